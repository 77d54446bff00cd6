
(function () {
  "use strict";
  var MOST_INCIDENTS = 200, MOST_NOTICES = 200;
  var $ = function (id) { return document.getElementById(id); };
  var incidents = new Map();
  var last = "", finished = false, loading = false, source = null, wanted = false;

  function element(tag, className, text) {
    var made = document.createElement(tag);
    if (className) { made.className = className; }
    if (text !== undefined) { made.textContent = text; }
    return made;
  }
  function at(seconds) {
    return seconds ? new Date(seconds * 1000).toLocaleTimeString() : "";
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
    $("live-incidents").replaceChildren();
    $("live-notices").replaceChildren();
    $("live-log").hidden = true;
    $("live-title").hidden = true;
    $("live-cover").textContent = "";
    finished = false;
  }

  function incident(data) {
    var item = element("li", known(data.state));
    var when = data.state === "resolved" ? "until " + at(data.ended) : "since " + at(data.began);
    item.append(element("span", "state " + known(data.state), data.state), element("span", "name", data.title));
    var rows = [["Began", (data.first_step === undefined || data.first_step === null ? "" : "step " + data.first_step + ", ") + when]];
    if (data.ranks) { rows.push(["Ranks", data.ranks + (data.axis ? ", axis " + data.axis : "")]); }
    Object.keys(data.details || {}).slice(0, 12).forEach(function (key) { rows.push([key, data.details[key]]); });
    if (data.capsule) { rows.push(["Capsule", data.capsule]); }
    if (data.rules > 1) { rows.push(["Rules", String(data.rules)]); }
    if (data.flaps) { rows.push(["Came back", data.flaps + "×"]); }
    var list = element("dl");
    if (data.state === "resolved") { rows = rows.slice(0, 1); }
    rows.forEach(function (row) { list.append(element("dt", "", row[0]), element("dd", "", row[1])); });
    item.append(list);
    incidents.delete(data.key);
    incidents.set(data.key, { data: data, item: item });
    if (incidents.size > MOST_INCIDENTS) { incidents.delete(incidents.keys().next().value); }
    var order = { firing: 0, suspected: 1, resolved: 2 };
    var sorted = Array.from(incidents.values()).sort(function (a, b) {
      var x = order[a.data.state], y = order[b.data.state];
      x = x === undefined ? 3 : x;
      y = y === undefined ? 3 : y;
      return x - y || (a.data.began || 0) - (b.data.began || 0);
    });
    $("live-incidents").replaceChildren.apply($("live-incidents"), sorted.map(function (one) { return one.item; }));
    var firing = sorted.filter(function (one) { return one.data.state === "firing"; }).length;
    $("live-title").hidden = false;
    $("live-title").textContent = firing ? firing + (firing === 1 ? " incident is firing" : " incidents are firing") : "No incident is firing";
    document.title = (firing ? "(" + firing + ") " : "") + "Proctor";
  }

  function step(data) {
    finished = !!data.finished;
    $("live-step").textContent = "step " + data.step.toLocaleString();
    var parts = [data.ranks === undefined || data.ranks === 1 ? "1 rank" : data.ranks + " ranks"];
    if (data.rate) { parts.push(data.rate.toPrecision(3) + " steps/s"); }
    if (data.ahead > data.step) { parts.push("judged " + (data.ahead - data.step) + " behind the run"); }
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
  connect();
})();
