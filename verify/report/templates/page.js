
(function () {
  "use strict";
  function prepare() {
    var box = document.getElementById("filter");
    if (box) { box.hidden = false; }
  }
  document.addEventListener("input", function (event) {
    var table = document.getElementById("rules");
    if (!event.target || event.target.id !== "filter" || !table) { return; }
    var want = event.target.value.toLowerCase();
    Array.prototype.forEach.call(table.tBodies[0].rows, function (row) {
      row.hidden = want !== "" && row.textContent.toLowerCase().indexOf(want) < 0;
    });
  });
  document.addEventListener("proctor:report", prepare);
  prepare();
})();
