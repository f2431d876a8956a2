"use strict";
(function () {
  const all = (what, of) => Array.from((of || document).querySelectorAll(what));
  // Findings: those of the chosen severities, check and rank.
  const form = document.getElementById("filter");
  let reveal = () => {};
  const within = (spans, rank) => spans === "" || spans.split(",").some((span) => {
    const [first, last] = span.split("-").map(Number);
    return first <= rank && rank <= (last === undefined ? first : last);
  });
  if (form) {
    const found = all(".finding");
    const apply = () => {
      const severities = all("[name=severity]:checked", form).map((box) => box.value);
      const check = form.elements.check.value, rank = form.elements.rank.value.trim();
      let count = 0;
      for (const one of found) {
        const data = one.dataset;
        const fits = severities.includes(data.severity) && (!check || check === data.check) &&
          (rank === "" || within(data.ranks, Number(rank)));
        one.hidden = !fits;
        count += fits;
      }
      form.elements.shown.value = count === found.length ? "" : count + " of " + found.length + " shown";
    };
    form.hidden = found.length < 2;
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    // A link to a finding that is filtered away shows it.
    reveal = () => { form.reset(); apply(); };
    window.addEventListener("hashchange", () => {
      const one = document.getElementById(location.hash.slice(1));
      if (one && one.hidden) { reveal(); one.scrollIntoView(); }
    });
  }
  // In the frame of a notebook links would lead out of the page.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (!link || location.protocol !== "about:") return;
    event.preventDefault();
    const one = document.getElementById(link.getAttribute("href").slice(1));
    if (one && one.hidden) reveal();
    if (one) one.scrollIntoView();
  });
  // Pictures that can be zoomed: by buttons, by + and -, by the wheel with Ctrl.
  for (const figure of all(".timeline")) {
    const tools = figure.querySelector(".tools"), area = figure.querySelector(".wide");
    const picture = area.querySelector("svg");
    let zoom = 1;
    const by = (factor, at) => {
      const share = (area.scrollLeft + at) / area.scrollWidth;
      zoom = factor ? Math.min(64, Math.max(1, zoom * factor)) : 1;
      picture.style.setProperty("--zoom", zoom);
      area.scrollLeft = share * area.scrollWidth - at;
    };
    tools.hidden = false;
    tools.addEventListener("click", (event) => {
      const factor = event.target.dataset.zoom;
      if (factor !== undefined) by(Number(factor), area.clientWidth / 2);
    });
    area.addEventListener("keydown", (event) => {
      const factor = { "+": 2, "=": 2, "-": 0.5, "0": 0 }[event.key];
      if (factor !== undefined && !event.ctrlKey && !event.metaKey) by(factor, area.clientWidth / 2);
    });
    area.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      by(event.deltaY < 0 ? 1.25 : 0.8, event.clientX - area.getBoundingClientRect().left);
    }, { passive: false });
  }
  // Maps: the value of a cell under the pointer, or under the arrow keys.
  for (const map of all(".map")) {
    const picture = map.querySelector("svg"), output = map.querySelector("output"), data = picture.dataset;
    const rows = data.rows.split(";"), columns = data.columns.split(";");
    const cells = data.cells.split(";").map((row) => row.split(","));
    let x = 0, y = 0;
    const say = () => {
      x = Math.min(columns.length - 1, Math.max(0, x));
      y = Math.min(rows.length - 1, Math.max(0, y));
      output.value = rows[y] + ", " + columns[x] + ": " + (cells[y][x] || "not measured");
    };
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      x = Math.floor((event.clientX - box.left) / box.width * columns.length);
      y = Math.floor((event.clientY - box.top) / box.height * rows.length);
      say();
    });
    picture.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      x += move[0];
      y += move[1];
      say();
    });
  }
  // Paper shows what is folded away.
  window.addEventListener("beforeprint", () => all("details").forEach((one) => { one.open = true; }));
})();
