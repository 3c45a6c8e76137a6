/** The maps of all heads on one text as training went on: a slider over its steps. */
const filmView = {
  name: "film",
  tab: "film",
  PACE: 500, // milliseconds a step
  NUMBERS: { entropy: "effectiveKeys", firstMass: "firstMass" },

  create(root, app) {
    const { el } = Dom, { film } = app.payload;
    this.stop();
    this.slider = el("input", { type: "range", min: 0, max: film.steps.length - 1, step: 1, "aria-label": app.t("film.step"), oninput: (event) => this.turnTo(app, event.target.value) });
    this.playButton = el("button", { type: "button", onclick: () => this.play(app) }, app.t("film.play"));
    this.choice = el("select", { onchange: (event) => app.set({ number: event.target.value }) },
      References.names.map((name) => el("option", { value: name }, app.t("heads.lift", { name }))),
      el("option", { value: "entropy" }, app.t("heads.entropy")), el("option", { value: "firstMass" }, app.t("heads.first")));
    const step = (by, key) => el("button", { type: "button", onclick: () => this.turnTo(app, this.frame(app) + by) }, app.t(key));
    this.said = el("p", { class: "said", role: "status" });
    this.grid = el("div", { class: "maps" });
    this.table = el("div");
    this.large = el("div");
    this.chart = el("div");
    Dom.show(root, el("h2", {}, app.t("film.title")),
      el("p", {}, app.t("film.about", { n: film.length })),
      el("p", { class: "quiet mono" }, film.text),
      el("div", { class: "controls" }, step(-1, "film.previous"), this.slider, step(1, "film.next"), this.playButton,
        el("label", {}, app.t("heads.number"), this.choice)),
      this.said,
      el("div", { class: "columns" }, el("div", {}, this.grid, this.table), el("div", {}, this.large, this.chart)));
    Captured.inflated(film.maps).then((bytes) => {
      this.bytes = new Uint8Array(bytes);
      if (this.root) this.draw(app);
    });
  },

  update(app, changed) {
    if (this.bytes && ["tab", "frame", "layer", "head", "number", "row", "trace"].some((name) => changed.has(name))) this.draw(app);
  },

  // ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

  frame(app) {
    return Math.max(0, Math.min(app.payload.film.steps.length - 1, app.state.frame ?? app.payload.film.steps.length - 1));
  },

  turnTo(app, frame) {
    app.set({ frame: Math.max(0, Math.min(app.payload.film.steps.length - 1, Number(frame))) });
  },

  /** Goes on by itself until the last step, or until it is pressed again; a step is a cut, nothing moves between. */
  play(app) {
    if (this.playing) return this.stop();
    const last = app.payload.film.steps.length - 1;
    if (this.frame(app) === last) this.turnTo(app, 0);
    this.playing = setInterval(() => {
      if (!this.root || this.frame(app) === last) this.stop();
      else this.turnTo(app, this.frame(app) + 1);
    }, this.PACE);
    this.playButton.setAttribute("aria-pressed", "true");
  },

  stop() {
    clearInterval(this.playing);
    this.playing = null;
    this.playButton?.setAttribute("aria-pressed", "false");
  },

  /** Weights of a head in a frame: t → (t + 1,), in [0, 1]. The film is (frames, L, H, lower triangle row by row), a byte each. */
  rows(app, frame, layer, head) {
    const { n_layer, n_head, length } = app.payload.film, size = (length * (length + 1)) / 2;
    const start = ((frame * n_layer + layer) * n_head + head) * size;
    return (t) => {
      const row = new Float64Array(t + 1), from = start + (t * (t + 1)) / 2;
      for (let s = 0; s <= t; s++) row[s] = this.bytes[from + s] / 255;
      return row;
    };
  },

  // ── what is shown ────────────────────────────────────────────────────────────────────────────────────────

  draw(app) {
    const { film } = app.payload, frame = this.frame(app);
    const layer = Math.min(app.state.layer, film.n_layer - 1), head = Math.min(app.state.head, film.n_head - 1);
    const number = [...References.names, ...Object.keys(this.NUMBERS)].includes(app.state.number) ? app.state.number : "previous";
    this.slider.value = frame;
    this.slider.setAttribute("aria-valuetext", `${film.steps[frame]}`);
    this.choice.value = number;
    this.said.textContent = app.t("film.at", { step: film.steps[frame], i: frame + 1, n: film.steps.length });
    this.drawGrid(app, { frame, layer, head, number });
    Dom.show(this.large, compareView.figure(app, {
      title: `L${layer}H${head}, ${app.t("film.at", { step: film.steps[frame], i: frame + 1, n: film.steps.length })}`,
      ids: film.ids, length: film.length, row: this.rows(app, frame, layer, head), still: true,
    }), Dom.scale(false, app.t("weight")));
    this.drawChart(app, { frame, layer, head, number });
  },

  /** The chosen number of a head: lift over uniform towards a pattern, or what needs no pattern. */
  number(app, name, frame, layer, head) {
    const { film } = app.payload, row = this.rows(app, frame, layer, head);
    if (name in this.NUMBERS) return References[this.NUMBERS[name]](row, film.length);
    return References.closeness(row, this.pattern(app, name), film.length).lift;
  },

  /** Two places, also where they are zeros. */
  short(x) {
    return Dom.number(Math.round(100 * x) / 100 + 0, 2);
  },

  pattern(app, name) {
    if (this.reference?.name !== name) this.reference = { name, rows: References.pattern(name, app.payload.film.ids, app.tokenizer) };
    return this.reference.rows;
  },

  drawGrid(app, { frame, layer, head, number }) {
    const { el } = Dom, { n_layer, n_head, length } = app.payload.film, wanted = `${n_layer}.${n_head}`;
    if (this.grid.dataset.shape !== wanted || !this.grid.childElementCount) {
      this.grid.dataset.shape = wanted;
      this.grid.style.gridTemplateColumns = `repeat(${n_head}, minmax(0, 1fr))`;
      Dom.show(this.grid, Array.from({ length: n_layer * n_head }, (_, i) => el("button", {
        type: "button", onclick: () => app.set({ layer: Math.floor(i / n_head), head: i % n_head }),
      }, el("canvas", { class: "map hatched", "aria-hidden": "true" }), el("span"))));
    }
    const rows = [...this.grid.children].map((button, i) => {
      const [l, h] = [Math.floor(i / n_head), i % n_head];
      button.setAttribute("aria-pressed", String(l === layer && h === head));
      Dom.paintMap(button.firstChild, length, this.rows(app, frame, l, h));
      const value = this.number(app, number, frame, l, h);
      button.lastChild.textContent = `L${l}H${h} ${this.short(value)}`;
      return [`L${l}H${h}`, Dom.number(value)];
    });
    Dom.show(this.table, Dom.asTable(app.t("table"), () => Dom.table([app.t("head"), app.t("heads.number")], rows)));
  },

  /** The number over the steps, as a line and as a table. */
  drawChart(app, { frame, layer, head, number }) {
    const { steps } = app.payload.film, label = this.choice.selectedOptions[0].textContent;
    const values = steps.map((_, i) => this.number(app, number, i, layer, head));
    const chart = this.line(steps, values, frame, `${label}, L${layer}H${head}`);
    const table = Dom.asTable(app.t("table"), () => Dom.table([app.t("film.step"), label], steps.map((step, i) => [step, Dom.number(values[i])])));
    table.open = this.isOpen;
    table.addEventListener("toggle", () => (this.isOpen = table.open));
    Dom.show(this.chart,
      Dom.el("h3", {}, `${label}, L${layer}H${head} `, Dom.copyButtons({
        csv: () => Dom.csv([["step", number], ...steps.map((step, i) => [step, values[i]])]), svg: () => Dom.svgText(chart),
      }, (copied) => (this.said.textContent = app.t(copied ? "copied" : "saved")))),
      chart, table);
  },

  line(steps, values, frame, label) {
    const { svg } = Dom, [width, high, left, top] = [480, 180, 56, 10];
    const known = values.filter(Number.isFinite), low = Math.min(0, ...known), range = Math.max(1, ...known) - low;
    const last = steps.at(-1) - steps[0] || 1;
    const x = (i) => left + ((width - left - 12) * (steps[i] - steps[0])) / last;
    const y = (value) => top + (high - top - 24) * (1 - (value - low) / range);
    const path = values.map((value, i) => (Number.isFinite(value) ? `${i && Number.isFinite(values[i - 1]) ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}` : "")).join("");
    const mark = { stroke: "#8a94a3", "stroke-width": 1 };
    return svg("svg", { viewBox: `0 0 ${width} ${high}`, width: "100%", style: { maxWidth: "40rem" }, role: "img", "aria-label": label },
      [low, low + range].map((value) => [
        svg("line", { x1: left, x2: width - 12, y1: y(value), y2: y(value), ...mark }),
        svg("text", { x: left - 4, y: y(value) + 4, "text-anchor": "end" }, this.short(value)),
      ]),
      svg("line", { x1: x(frame), x2: x(frame), y1: top, y2: high - 24, ...mark, "stroke-dasharray": "3 3" }),
      svg("path", { d: path, class: "arc", "stroke-width": 2 }),
      Number.isFinite(values[frame]) && svg("circle", { cx: x(frame), cy: y(values[frame]), r: 4, fill: "#3b82c4" }),
      svg("text", { x: left, y: high - 6 }, steps[0]), svg("text", { x: width - 12, y: high - 6, "text-anchor": "end" }, steps.at(-1)));
  },
};
