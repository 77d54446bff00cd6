
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
(function () {
  "use strict";
  var box = document.getElementById("find"), fold = document.getElementById("fold"), unfold = document.getElementById("unfold");
  if (!box || !fold || !unfold) { return; }
  var nodes = Array.prototype.slice.call(document.querySelectorAll(".model .node")), first = nodes.map(function (node) { return node.open; });
  box.hidden = fold.hidden = unfold.hidden = false;
  function all(open) { nodes.forEach(function (node, i) { node.open = open || i === 0; }); }
  fold.addEventListener("click", function () { all(false); });
  unfold.addEventListener("click", function () { all(true); });
  box.addEventListener("input", function () {
    var want = box.value.toLowerCase().trim();
    nodes.forEach(function (node, i) { node.hidden = want !== ""; node.open = want === "" && first[i]; });
    if (want === "") { return; }
    nodes.forEach(function (node) {
      if (node.getAttribute("data-path").indexOf(want) < 0) { return; }
      for (var at = node; at && at.classList.contains("node"); at = at.parentElement) { at.hidden = false; if (at !== node) { at.open = true; } }
      Array.prototype.forEach.call(node.querySelectorAll(".node"), function (child) { child.hidden = false; });
    });
  });
})();
