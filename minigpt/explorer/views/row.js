/** One row of one head, step by step: computed here from the model's q, k and v, and held against its own weights. */
const rowView = {
  name: "row",
  tab: "look",
  MOST_LATER: 12, // masked tokens that are listed

  create(root, app) {
    const { el } = Dom;
    this.title = el("h2");
    this.buttons = [1, 2, 3, 4, 5, 6].map((step) =>
      el("button", { type: "button", onclick: () => app.set({ step }), "aria-keyshortcuts": step }, app.t(`row.step${step}`)));
    this.formula = el("p", { class: "formula", role: "status" });
    this.table = el("div", { class: "tall" });
    this.detail = el("div", { class: "tall" });
    this.deviation = el("p", { class: "quiet" });
    this.dimension = el("input", { type: "number", min: 0, step: 1, onchange: () => app.set({ component: this.dimension.value }) });
    this.choice = el("label", {}, app.t("row.dimension"), this.dimension);
    root.append(this.title, el("p", {}, app.t("row.about")), el("div", { class: "controls" }, this.buttons, this.choice),
      this.formula, el("div", { class: "columns" }, this.table, this.detail), this.deviation);
  },

  /** All numbers of the row, in float64. */
  compute(app) {
    const { trace, state } = app, { layer, head, row } = state, size = app.engine.sizes.head_dim;
    const later = Math.min(trace.length - 1 - row, this.MOST_LATER), seen = row + 1 + later;
    const places = Array.from({ length: seen }, (_, s) => s), query = Array.from(trace.query(layer, head, row));
    const keys = places.map((s) => Array.from(trace.key(layer, head, s))), values = places.map((s) => Array.from(trace.value(layer, head, s)));
    const steps = Attention.steps({ query: [query], key: keys, value: values, mask: [places.map((s) => s <= row)], scaled: true });
    const own = trace.weights(layer, head, row), output = trace.output(layer, head, row);
    const largest = (a, b) => Math.max(...Array.from(b, (x, i) => Math.abs(x - a[i])));
    return {
      size, query, keys, values, later: trace.length - seen, raw: steps.raw[0], scaled: steps.scaled[0], masked: steps.masked[0], weights: steps.weights[0],
      output: steps.output[0], deviation: { weights: largest(steps.weights[0], own), output: largest(steps.output[0], output) },
    };
  },

  update(app, changed) {
    const { state, trace } = app;
    if (!trace) return;
    if (["trace", "layer", "head", "row"].some((name) => changed.has(name)) || !this.found) this.found = this.compute(app);
    const found = this.found, { step } = state, key = Math.min(state.key, found.raw.length - 1);
    const component = Math.max(0, Math.min(found.size - 1, Math.trunc(Number(state.component)) || 0));
    this.title.textContent = app.t("row.title", { head: `L${state.layer}H${state.head}`, place: app.place(state.row) });
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", i + 1 === step));
    this.choice.hidden = step !== 5;
    this.dimension.max = found.size - 1;
    this.dimension.value = component;
    this.formula.textContent = this.written(app, found, key, component);
    Dom.show(this.table, this.stages(app, found, key, component), found.later ? Dom.el("p", { class: "quiet" }, app.t("row.later", { n: found.later })) : "");
    requestAnimationFrame(() => { // when all is laid out anyway
      const chosen = this.table.querySelector("[aria-selected]");
      if (chosen) this.table.scrollTop = chosen.offsetTop - this.table.clientHeight / 2;
    });
    this.detail.hidden = step !== 1 && step !== 6;
    Dom.show(this.detail, step === 1 ? this.products(app, found, key) : step === 6 ? this.outputs(app, found) : "");
    this.deviation.textContent = app.t("row.deviation", { weights: found.deviation.weights.toExponential(1), output: found.deviation.output.toExponential(1) });
  },

  /** The formula of the step with its numbers, for the chosen key. */
  written(app, found, key, component) {
    const n = (x) => Dom.number(x, 3), sum = (terms) => `${terms.slice(0, 4).join(" + ")}${terms.length > 4 ? " + …" : ""}`;
    const largest = Math.max(...found.masked);
    return app.t(`row.formula${app.state.step}`, {
      1: { terms: sum(found.query.map((q, i) => `${n(q)}·${n(found.keys[key][i])}`)), sum: n(found.raw[key]) },
      2: { score: n(found.raw[key]), size: found.size, scaled: n(found.scaled[key]) },
      3: { place: app.place(app.state.row) },
      4: { scaled: n(found.masked[key]), largest: n(largest), sum: n(found.masked.reduce((all, x) => all + Math.exp(x - largest), 0)), weight: n(found.weights[key]) },
      5: { i: component, terms: sum(found.weights.map((w, s) => `${n(w)}·${n(found.values[s][component])}`)), sum: n(found.output[component]) },
      6: { size: found.size },
    }[app.state.step]);
  },

  /** A line for each key, a column for each step so far. */
  stages(app, found, key, component) {
    const { step } = app.state, n = (x) => Dom.number(x, 4), top = Math.max(...found.masked);
    const columns = [["score", (s) => n(found.raw[s])], ["scaled", (s) => n(found.scaled[s])], ["masked", (s) => n(found.masked[s])],
      ["exp", (s) => n(Math.exp(found.masked[s] - top))], ["weight", (s) => n(found.weights[s])],
      ["contribution", (s) => n(found.weights[s] * found.values[s][component])]].slice(0, [1, 2, 3, 5, 6, 6][step - 1]);
    const series = [found.raw, found.scaled, found.masked, found.weights, found.weights.map((w, s) => w * found.values[s][component]), found.weights][step - 1];
    const largest = Math.max(...series.filter(Number.isFinite).map(Math.abs));
    const table = Dom.table([app.t("from"), "", ...columns.map(([name]) => app.t(name, { i: component }))], found.raw.map((_, s) => [
      Dom.el("button", { type: "button", class: "token", "aria-current": s === key, onclick: () => app.set({ key: s }) }, app.place(s)),
      step === 4 || step === 6 ? Dom.bar(series[s]) : Dom.signedBar(series[s], largest), ...columns.map(([, cell]) => cell(s))]));
    table.querySelectorAll("tbody tr")[key]?.setAttribute("aria-selected", "true");
    return table;
  },

  products(app, found, key) {
    const products = found.query.map((q, i) => q * found.keys[key][i]), largest = Math.max(...products.map(Math.abs));
    return Dom.table([app.t("row.dimension"), app.t("query"), app.t("key"), app.t("product"), ""],
      products.map((x, i) => [i, Dom.number(found.query[i]), Dom.number(found.keys[key][i]), Dom.number(x), Dom.signedBar(x, largest)]),
      app.t("row.products", { key: app.place(key) }));
  },

  outputs(app, found) {
    const largest = Math.max(...found.output.map(Math.abs));
    return Dom.table([app.t("row.dimension"), app.t("output"), ""], found.output.map((x, i) => [i, Dom.number(x, 5), Dom.signedBar(x, largest)]));
  },
};
