
(function () {
  "use strict";
  var box = document.getElementById("filter"), word = document.getElementById("word"), table = document.getElementById("rows");
  if (!box || !word || !table) { return; }
  box.hidden = word.hidden = false;
  function apply() {
    var want = box.value.toLowerCase(), shown = 0, rows = table.tBodies[0].rows;
    Array.prototype.forEach.call(rows, function (row) {
      var fits = (word.value === "" || row.getAttribute("data-word") === word.value) && (want === "" || row.textContent.toLowerCase().indexOf(want) >= 0);
      row.hidden = !fits;
      if (fits) { shown += 1; }
    });
    document.getElementById("shown").textContent = shown === rows.length ? "" : shown + " of " + rows.length;
  }
  box.addEventListener("input", apply);
  word.addEventListener("change", apply);
  window.addEventListener("hashchange", function () {
    var row = document.getElementById(location.hash.slice(1));
    if (row && row.hidden) { box.value = word.value = ""; apply(); row.scrollIntoView(); }
  });
})();
