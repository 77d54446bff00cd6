
(function () {
  "use strict";
  var box = document.getElementById("filter");
  var table = document.getElementById("rules");
  if (!box || !table) { return; }
  box.hidden = false;
  box.addEventListener("input", function () {
    var want = box.value.toLowerCase();
    Array.prototype.forEach.call(table.tBodies[0].rows, function (row) {
      row.hidden = want !== "" && row.textContent.toLowerCase().indexOf(want) < 0;
    });
  });
})();
