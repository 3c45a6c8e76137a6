/** One head: its map, the arcs of the chosen row, and how close it comes to fixed patterns. */
const headView = {
  name: "head",
  tab: "look",

  create(root, app) {
    const { el } = Dom;
    this.title = el("h2");
    this.hide = el("input", { type: "checkbox", onchange: () => app.set({ hide: this.hide.checked ? "1" : "" }) });
    this.root = el("input", { type: "checkbox", onchange: () => app.set({ root: this.root.checked ? "1" : "" }) });
    this.canvas = el("canvas", { class: "map hatched", "aria-hidden": "true" });
    this.mark = el("div", { class: "mark", hidden: true });
    this.frame = el("div", { class: "map-frame", tabindex: 0, role: "application", "aria-label": app.t("head.about"),
      onpointermove: (event) => this.point(app, event), onpointerleave: () => this.say(app, app.state.row, app.state.key),
      onclick: (event) => { const cell = this.cell(app, event); if (cell) app.set(cell); }, onkeydown: (event) => this.move(app, event) },
    this.canvas, this.mark);
    this.said = el("p", { class: "said mono", role: "status" });
    this.hidden = el("p", { class: "quiet" });
    this.legend = el("div");
    this.copied = el("span", { class: "quiet", role: "status" });
    this.arcs = el("div", { class: "scroll from-end", tabindex: 0 });
    this.arcsTitle = el("h3");
    this.references = el("div");
    root.append(this.title, el("p", {}, app.t("head.about")),
      el("div", { class: "columns" },
        el("div", {},
          el("div", { class: "controls" }, el("label", {}, this.hide, app.t("head.hide")), el("label", {}, this.root, app.t("head.root"))),
          this.hidden, this.frame, this.said, this.legend,
          Dom.copyButtons({ csv: () => Dom.csv(this.rows(app)), svg: () => Dom.svgText(this.drawing(app)), png: () => this.canvas },
            (done) => (this.copied.textContent = app.t(done ? "copied" : "saved"))), this.copied,
          Dom.asTable(app.t("table"), () => Dom.table(this.rows(app)[0], this.rows(app).slice(1)))),
        el("div", {}, this.arcsTitle, this.arcs, el("h3", {}, app.t("head.references")), this.references)));
  },

  update(app, changed) {
    const { state, trace } = app;
    if (!trace) return;
    const { layer, head, row } = state, weights = (t) => trace.weights(layer, head, t);
    this.hide.checked = Boolean(state.hide);
    this.root.checked = Boolean(state.root);
    if (["trace", "layer", "head", "hide", "root"].some((name) => changed.has(name))) {
      this.title.textContent = app.t("head.title", { head: `L${layer}H${head}` });
      Dom.paintMap(this.canvas, trace.length, weights, { root: Boolean(state.root), from: state.hide ? 1 : 0 });
      Dom.show(this.legend, Dom.scale(Boolean(state.root), app.t("head.shade")));
      this.hidden.textContent = state.hide ? app.t("head.hidden", { mass: Dom.percent(References.firstMass(weights, trace.length)) }) : "";
      this.compare(app, weights);
    }
    this.arcsTitle.textContent = app.t("head.arcs", { row: app.place(row) });
    Dom.show(this.arcs, this.drawArcs(app, weights(row)));
    this.say(app, row, state.key);
  },

  /** The cell under a pointer, if it is one that is not masked. */
  cell(app, event) {
    const box = this.canvas.getBoundingClientRect(), n = app.trace.length;
    const row = Math.floor(((event.clientY - box.top) / box.height) * n), key = Math.floor(((event.clientX - box.left) / box.width) * n);
    return row >= 0 && row < n && key >= 0 && key <= row ? { row, key } : null;
  },

  point(app, event) {
    const cell = app.trace && this.cell(app, event);
    if (cell) this.say(app, cell.row, cell.key);
  },

  say(app, row, key) {
    if (!app.trace) return;
    const n = app.trace.length, at = Math.min(key, row), weight = app.trace.weights(app.state.layer, app.state.head, row)[at];
    this.said.textContent = app.t("head.cell", { row: app.place(row), key: app.place(at), weight: Dom.number(weight) });
    this.mark.hidden = false;
    Object.assign(this.mark.style, { left: `${(100 * at) / n}%`, top: `${(100 * row) / n}%`, width: `${100 / n}%`, height: `${100 / n}%` });
  },

  move(app, event) {
    const [down, right] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(app.trace.length - 1, app.state.row + down));
    app.set({ row, key: Math.max(0, Math.min(row, app.state.key + right)) });
  },

  /** Arcs from the row's token to each that it looks at, as wide as their weight. */
  drawArcs(app, weights) {
    const { svg } = Dom, { trace } = app, row = weights.length - 1, first = Math.max(0, row - 63);
    const step = 26, left = 20, x = (t) => left + (t - first) * step, base = Math.min(160, 24 + (row - first) * 9), height = base + 34;
    const drawing = svg("svg", { width: x(row) + 30, height, viewBox: `0 0 ${x(row) + 30} ${height}`, role: "img", "aria-label": app.t("head.arcs", { row: app.place(row) }) });
    for (let s = first; s <= row; s++) {
      const weight = weights[s], top = base - Math.min(base - 8, 10 + 9 * (row - s)) * 1.3;
      const path = s === row ? `M${x(s) - 7},${base} C${x(s) - 12},${base - 24} ${x(s) + 12},${base - 24} ${x(s) + 7},${base}`
        : `M${x(row)},${base} C${x(row)},${top} ${x(s)},${top} ${x(s)},${base}`;
      if (weight >= 0.005) {
        drawing.append(svg("path", { class: "arc", d: path, "stroke-width": Math.max(0.75, 7 * weight), "stroke-opacity": Math.min(1, 0.25 + weight) },
          svg("title", {}, `${app.place(s)}: ${Dom.number(weight)}`)));
      }
      drawing.append(svg("text", { x: x(s), y: base + 14, "text-anchor": "middle" }, [...app.tokenizer.show(trace.ids[s])].slice(0, 4).join("")),
        svg("text", { x: x(s), y: base + 28, "text-anchor": "middle", style: { fontSize: "9px" } }, weight >= 0.005 ? Dom.number(weight, 2).replace("0.", ".") : ""));
    }
    return drawing;
  },

  compare(app, weights) {
    const { trace } = app;
    const found = References.names.map((name) => [name, References.closeness(weights, References.pattern(name, trace.ids, app.tokenizer), trace.length)]);
    const nearest = References.nearest(Object.fromEntries(found), app.payload.nulls);
    Dom.show(this.references,
      Dom.el("p", {}, nearest ? app.t("head.nearest", { name: nearest }) : app.t("head.none")),
      Dom.table([app.t("reference"), app.t("mass"), app.t("tv"), app.t("lift"), app.t("agreement"), app.t("coverage")],
        found.map(([name, { mass, tv, lift, agreement, coverage }]) =>
          [name, Dom.number(mass, 3), Dom.number(tv, 3), Dom.number(lift, 3), Dom.percent(agreement, 0), Dom.percent(coverage, 0)])));
  },

  rows(app) {
    const { trace, state } = app, names = Array.from(trace.ids, (_, t) => app.place(t));
    return [[app.t("from"), ...names], ...names.map((name, t) => [name, ...Array.from(trace.weights(state.layer, state.head, t), (w) => Dom.number(w))])];
  },

  /** The map as a drawing that scales. */
  drawing(app) {
    const { svg } = Dom, { trace, state } = app, size = 8, colours = Dom.shades(), n = trace.length;
    const drawing = svg("svg", { width: n * size, height: n * size, viewBox: `0 0 ${n * size} ${n * size}` });
    for (let t = 0; t < n; t++) {
      trace.weights(state.layer, state.head, t).forEach((weight, s) => {
        const shade = colours[Math.round(255 * Math.min(1, state.root ? Math.sqrt(weight) : weight))];
        if (!(state.hide && s === 0)) drawing.append(svg("rect", { x: s * size, y: t * size, width: size, height: size, fill: `rgb(${shade})` }));
      });
    }
    return drawing;
  },
};
