/** All heads as small maps, each with one chosen number; beside it what heads of untrained networks get. */
const headsView = {
  name: "heads",
  tab: "look",

  create(root, app) {
    const { el } = Dom, { sizes } = app.engine;
    const choices = [...References.names.map((name) => [name, app.t("heads.lift", { name })]), ["entropy", app.t("heads.entropy")], ["firstMass", app.t("heads.first")]];
    this.choice = el("select", { onchange: () => app.set({ number: this.choice.value }) },
      choices.map(([value, label]) => el("option", { value }, label)));
    this.maps = Array.from({ length: sizes.n_layer * sizes.n_head }, (_, i) => {
      const layer = Math.floor(i / sizes.n_head), head = i % sizes.n_head;
      const canvas = el("canvas", { class: "map hatched", "aria-hidden": "true" }), said = el("span");
      const button = el("button", { type: "button", "data-head": `L${layer}H${head}`, onclick: () => app.set({ layer, head }) },
        canvas, `L${layer}H${head} `, said);
      return { layer, head, canvas, said, button };
    });
    const width = Math.max(44, Math.min(150, 900 / sizes.n_head));
    const grid = el("div", { class: "maps", onkeydown: (event) => this.move(app, event), role: "group", "aria-label": app.t("heads.title"),
      style: { gridTemplateColumns: `repeat(${sizes.n_head}, minmax(${Math.min(width, 60)}px, ${width}px))` } },
    this.maps.map(({ button }) => button));
    this.null = el("p", { class: "quiet" });
    root.append(el("h2", {}, app.t("heads.title")), el("p", {}, app.t("heads.about")),
      el("div", { class: "controls" }, el("label", {}, app.t("heads.number"), this.choice), Dom.scale(false, app.t("head.shade"))),
      el("div", { class: "scroll" }, grid), this.null, Dom.asTable(app.t("table"), () => this.table(app)));
  },

  update(app, changed) {
    const { state, trace } = app;
    if (!trace) return;
    const number = this.number(app);
    this.choice.value = number;
    for (const map of this.maps) {
      const { layer, head, canvas, said, button } = map;
      if (changed.has("trace")) Dom.paintMap(canvas, trace.length, (t) => trace.weights(layer, head, t));
      if (changed.has("trace") || changed.has("number")) said.textContent = Dom.number((map.value = this.value(app, number, layer, head)), 2);
      const chosen = layer === state.layer && head === state.head;
      button.setAttribute("aria-pressed", chosen);
      button.tabIndex = chosen ? 0 : -1;
      if (chosen && this.maps.some((other) => other.button === document.activeElement)) button.focus();
    }
    const nulls = app.payload.nulls?.[number];
    this.null.textContent = !References.names.includes(number) ? ""
      : !nulls ? app.t("heads.noNull")
        : app.t("heads.null", { n: nulls.heads, median: Dom.number(nulls.median, 2), maximum: Dom.number(nulls.maximum, 2),
          over: this.maps.filter(({ value }) => value > nulls.maximum).length });
  },

  number(app) {
    return [...References.names, "entropy", "firstMass"].includes(app.state.number) ? app.state.number : "previous";
  },

  value(app, number, layer, head) {
    const { trace } = app, rows = (t) => trace.weights(layer, head, t);
    if (number === "firstMass") return References.firstMass(rows, trace.length);
    if (number === "entropy") return References.effectiveKeys(rows, trace.length);
    return References.closeness(rows, References.pattern(number, trace.ids, app.tokenizer), trace.length).lift;
  },

  table(app) {
    const rows = this.maps.map(({ layer, head, value }) => [`L${layer}H${head}`, Dom.number(value, 4)]);
    return Dom.table([app.t("head"), this.choice.selectedOptions[0].textContent], rows);
  },

  move(app, event) {
    const { layer, head } = app.state, { n_layer, n_head } = app.engine.sizes;
    const [down, right] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    app.set({ layer: Math.max(0, Math.min(n_layer - 1, layer + down)), head: Math.max(0, Math.min(n_head - 1, head + right)) });
  },
};
