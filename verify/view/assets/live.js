
(function () {
  "use strict";
  var A_PAGE = 25, UNFOLDED = 3, MOST_NOTICES = 200;  // incidents on a page; firing ones that are open where there are no more
  var $ = function (id) { return document.getElementById(id); };
  var incidents = new Map();  // by key, all of them
  var chosen = new Map();  // by key: whether a reader opened or closed it
  var page = 0, drawn = "", due = false;
  var last = "", finished = false, loading = false, source = null, wanted = false;

  function element(tag, className, text) {
    var made = document.createElement(tag);
    if (className) { made.className = className; }
    if (text !== undefined) { made.textContent = text; }
    return made;
  }
  function at(seconds) {  // with its day, unless that is today
    if (!seconds) { return ""; }
    var then = new Date(seconds * 1000);
    return then.toDateString() === new Date().toDateString() ? then.toLocaleTimeString() : then.toLocaleString();
  }
  function state(name, text) {
    $("live-state").className = "dot " + name;
    $("live-state").textContent = text;
  }
  function known(name) {
    return name === "firing" || name === "suspected" || name === "resolved" ? name : "";
  }

  function reset() {
    incidents.clear();
    drawn = "";
    $("live-incidents").replaceChildren();
    $("live-notices").replaceChildren();
    $("live-log").hidden = true;
    $("live-title").hidden = true;
    $("live-tools").hidden = true;
    $("live-cover").textContent = "";
    finished = false;
  }

  function incident(data) {
    incidents.set(data.key, data);
    if (!due) {  // many come at once
      due = true;
      window.requestAnimationFrame(function () { due = false; draw(); });
    }
  }

  function words(data) {
    if (data.words === undefined) {
      var more = Object.keys(data.details || {}).map(function (key) { return data.details[key]; });
      data.words = [data.title, data.code, data.key, data.ranks, data.axis, data.severity, data.tier].concat(more).join(" ").toLowerCase();
    }
    return data.words;
  }

  function rank(data) {
    var order = { firing: 0, suspected: 1, resolved: 2 };
    return order[data.state] === undefined ? 3 : order[data.state];
  }

  function draw() {
    var all = Array.from(incidents.values()), count = { firing: 0, suspected: 0, resolved: 0 };
    all.forEach(function (one) { if (count[one.state] !== undefined) { count[one.state] += 1; } });
    title(count, all.length);
    var wish = $("live-show").value, find = $("live-find").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    var fitting = all.filter(function (one) {
      return (!wish || one.state === wish) && find.every(function (word) { return words(one).includes(word); });
    });
    fitting.sort(function (a, b) {
      var x = rank(a), y = rank(b);
      return x - y || (x === 2 ? (b.ended || 0) - (a.ended || 0) : (a.began || 0) - (b.began || 0)) || a.key.localeCompare(b.key, undefined, { numeric: true });
    });
    var pages = Math.max(1, Math.ceil(fitting.length / A_PAGE));
    page = Math.min(Math.max(0, page), pages - 1);
    var first = page * A_PAGE, shown = fitting.slice(first, first + A_PAGE);
    $("live-tools").hidden = all.length <= UNFOLDED;
    $("live-page").textContent = fitting.length ? (first + 1).toLocaleString() + "–" + (first + shown.length).toLocaleString() + " of " + fitting.length.toLocaleString() : "none of " + all.length.toLocaleString();
    $("live-back").disabled = page === 0;
    $("live-on").disabled = page === pages - 1;
    var open = all.length <= UNFOLDED;
    var look = JSON.stringify([open, shown.map(function (one) { return [one.key, one.id]; })]);
    if (look === drawn) { return; }
    drawn = look;
    var held = document.activeElement && document.activeElement.closest ? document.activeElement.closest("#live-incidents li") : null;
    held = held ? held.dataset.key : "";
    $("live-incidents").replaceChildren.apply($("live-incidents"), shown.map(function (one) { return drawOne(one, open); }));
    Array.from($("live-incidents").children).forEach(function (item) {
      if (held && item.dataset.key === held) { item.querySelector("summary").focus(); }
    });
  }

  function title(count, all) {
    var firing = count.firing, parts = [firing ? firing.toLocaleString() + (firing === 1 ? " incident is firing" : " incidents are firing") : "No incident is firing"];
    if (count.suspected) { parts.push(count.suspected.toLocaleString() + " suspected"); }
    if (count.resolved) { parts.push(count.resolved.toLocaleString() + " over"); }
    var text = parts.join(", ");
    $("live-title").hidden = !all;
    if ($("live-title").textContent !== text) { $("live-title").textContent = text; }
    document.title = (firing ? "(" + firing + ") " : "") + "Proctor";
  }

  function drawOne(data, open) {
    var item = element("li", known(data.state)), fold = element("details"), head = element("summary");
    var when = data.state === "resolved" ? "until " + at(data.ended) : "since " + at(data.began);
    item.dataset.key = data.key;
    var step = data.first_step === undefined || data.first_step === null ? "" : "step " + data.first_step + ", ";
    head.append(element("span", "state " + known(data.state), data.state === "resolved" ? "over" : data.state), element("span", "name", data.title), element("span", "soft", step + when));
    var rows = [["Began", step + "since " + at(data.began)]];
    if (data.state === "resolved") { rows.push(["Over", at(data.ended)]); }
    if (data.ranks) { rows.push(["Ranks", data.ranks + (data.axis ? ", axis " + data.axis : "")]); }
    Object.keys(data.details || {}).slice(0, 12).forEach(function (key) { rows.push([key, data.details[key]]); });
    if (data.capsule) { rows.push(["Capsule", data.capsule]); }
    if (data.rules > 1) { rows.push(["Rules", String(data.rules)]); }
    if (data.flaps) { rows.push(["Came back", data.flaps + "×"]); }
    var list = element("dl");
    rows.forEach(function (row) { list.append(element("dt", "", row[0]), element("dd", "", row[1])); });
    fold.open = chosen.has(data.key) ? chosen.get(data.key) : open && data.state === "firing";
    head.addEventListener("click", function () { chosen.set(data.key, !fold.open); });
    fold.append(head, list);
    item.append(fold);
    return item;
  }

  function turn(by) {
    page += by;
    draw();
    $("live-title").scrollIntoView({ block: "nearest" });
  }

  function step(data) {
    finished = !!data.finished;
    $("live-step").textContent = "step " + data.step.toLocaleString();
    var parts = [data.ranks === undefined || data.ranks === 1 ? "1 rank" : data.ranks + " ranks"];
    if (data.rate) { parts.push(data.rate.toPrecision(3) + " steps/s"); }
    if (data.ahead > data.step) { parts.push("judged " + (data.ahead - data.step) + " behind the run"); }
    if (data.overhead) { parts.push("cost " + (100 * data.overhead).toFixed(1) + " %"); }
    if (data.delay) { parts.push("every step within " + data.delay + " looked at"); }
    if (data.latency_ms) { parts.push("verdict " + data.latency_ms.toFixed(0) + " ms after a step"); }
    if (data.checked) { parts.push(data.checked + " rules checked"); }
    if (data.behind !== undefined && data.behind !== null) { parts.push("rank " + data.behind + " is at step " + data.behind_step); }
    $("live-more").textContent = parts.join(" · ");
    state(finished ? "over" : "live", finished ? "the run is over" : "live");
  }

  function coverage(data) {
    var parts = [];
    Object.keys(data.lost || {}).forEach(function (why) { parts.push(data.lost[why] + " records lost (" + why + ")"); });
    if ((data.silent || []).length) { parts.push("silent: rank " + data.silent.slice(0, 8).join(", ") + (data.silent.length > 8 ? ", …" : "")); }
    $("live-cover").textContent = parts.concat(data.notes || []).join(" · ");
  }

  function notice(data) {
    var text = at(data.time) + "  " + data.action + " " + (data.title || data.key) + ": " + (data.outcome || "queued");
    $("live-notices").prepend(element("li", "", text + (data.sink ? " to " + data.sink : "") + (data.reason ? " (" + data.reason + ")" : "")));
    while ($("live-notices").children.length > MOST_NOTICES) { $("live-notices").lastChild.remove(); }
    $("live-log").hidden = false;
  }

  function busy() {
    var chosen = document.getSelection();
    return (chosen && !chosen.isCollapsed) || $("report").contains(document.activeElement) && document.activeElement !== $("report");
  }

  function report() {
    if (loading) { wanted = true; return; }
    if (busy()) { $("live-newer").hidden = false; return; }
    load();
  }

  function load() {
    loading = true;
    wanted = false;
    $("live-newer").hidden = true;
    fetch("report", { credentials: "same-origin" }).then(function (answer) {
      return answer.ok ? answer.text() : Promise.reject(answer.status);
    }).then(function (text) {
      var open = Array.prototype.map.call($("report").querySelectorAll("details"), function (one) { return one.open; });
      var top = window.scrollY, height = $("report").offsetHeight;
      var fresh = new DOMParser().parseFromString(text, "text/html");
      $("report").replaceChildren.apply($("report"), Array.from(fresh.body.childNodes));
      var details = $("report").querySelectorAll("details");
      if (details.length === open.length) { details.forEach(function (one, i) { one.open = open[i]; }); }
      if (height === $("report").offsetHeight) { window.scrollTo(0, top); }
      document.dispatchEvent(new Event("proctor:report"));
    }).catch(function () {}).finally(function () {
      loading = false;
      if (wanted) { report(); }
    });
  }

  function listen(name, handle) {
    source.addEventListener(name, function (event) {
      if (event.lastEventId) { last = event.lastEventId; }
      var data;
      try { data = JSON.parse(event.data); } catch (error) { return; }
      data.id = event.lastEventId;
      handle(data);
    });
  }

  function connect() {
    source = new EventSource("events" + (last ? "?after=" + encodeURIComponent(last) : ""));
    listen("reset", reset);
    listen("incident", incident);
    listen("step", step);
    listen("coverage", coverage);
    listen("notice", notice);
    listen("report", report);
    source.onopen = function () { if (!finished) { state("live", "live"); } };
    source.onerror = function () {
      state("lost", "connection lost, trying again");
      if (source.readyState === EventSource.CLOSED) { window.setTimeout(connect, 5000); }
    };
  }

  $("live-newer").addEventListener("click", load);
  $("live-tools").addEventListener("submit", function (event) { event.preventDefault(); });
  $("live-find").addEventListener("input", function () { page = 0; draw(); });
  $("live-show").addEventListener("change", function () { page = 0; draw(); });
  $("live-back").addEventListener("click", function () { turn(-1); });
  $("live-on").addEventListener("click", function () { turn(1); });
  connect();
})();
