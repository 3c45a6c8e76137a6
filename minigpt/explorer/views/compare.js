/** Two texts, two checkpoints, a head and a pattern, or a model before and after a change of some of its heads. */
const compareView = {
  name: "compare",
  tab: "compare",
  TOP: 8,

  create(root, app) {
    const { el } = Dom;
    this.turn = 0;
    this.kinds = {
      texts: true, checkpoints: app.engines.length > 1, reference: true, change: app.engine.canChange,
    };
    this.choice = el("div", { class: "controls", role: "group", "aria-label": app.t("compare.what") },
      Object.keys(this.kinds).filter((kind) => this.kinds[kind]).map((kind) =>
        el("button", { type: "button", "data-kind": kind, onclick: () => app.set({ compare: kind }) }, app.t(`compare.${kind}`))));
    this.controls = el("div", { class: "controls" });
    this.said = el("p", { class: "said", role: "status" });
    this.body = el("div");
    this.laidOut = "";
    Dom.show(root, el("h2", {}, app.t("compare.title")), el("p", {}, app.t("compare.about")), this.choice, this.controls, this.said, this.body);
  },

  kind(app) {
    return this.kinds[app.state.compare] ? app.state.compare : Object.keys(this.kinds).find((kind) => this.kinds[kind]);
  },

  async update(app) {
    const kind = this.kind(app), turn = ++this.turn;
    for (const button of this.choice.children) button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
    this.layOut(app, kind);
    this.fillIn(app);
    if (app.mistake) this.said.textContent = app.mistake;
    if (!app.trace) return;
    try {
      const shown = await this[`show_${kind}`](app);
      if (turn !== this.turn) return; // a later choice is on its way
      this.said.textContent = app.mistake || shown.said;
      Dom.show(this.body, el(shown.body));
    } catch (error) {
      if (turn !== this.turn) return;
      this.said.textContent = error.message;
      Dom.show(this.body);
    }

    function el(children) {
      return Dom.el("div", {}, children);
    }
  },

  // ── what is chosen ───────────────────────────────────────────────────────────────────────────────────────

  /** The fields of the kind; made anew only when the kind changes, so that the focus stays where one types. */
  layOut(app, kind) {
    if (this.laidOut === kind) return;
    this.laidOut = kind;
    this.fields = {};
    const { sizes } = app.engine, heads = Array.from({ length: sizes.n_layer * sizes.n_head }, (_, i) =>
      [i, `L${Math.floor(i / sizes.n_head)}H${i % sizes.n_head}`]);
    const text = (name, label) => app.engine.canType
      ? this.field(name, label, Dom.el("textarea", { rows: 2, oninput: (event) => this.later(() => app.set({ [name]: event.target.value })) }))
      : this.select(name, label, app.engine.texts.map((one) => [one, one.slice(0, 40)]), (value) => app.set({ [name]: value }));
    const models = app.engines.map((engine, i) => [i, engine.name]);
    const references = (name, label, first = []) => this.select(name, label,
      [...first, ...References.names.map((one) => [one, one])], (value) => app.set({ [name]: value }));
    Dom.show(this.controls,
      text("text", app.t(kind === "texts" ? "compare.first" : "tokens.label")),
      kind === "texts" && text("second", app.t("compare.second")),
      kind === "checkpoints" && this.select("other", app.t("compare.firstModel"), models, (value) => app.set({ other: Number(value) })),
      app.engines.length > 1 && this.select("model", app.t(kind === "checkpoints" ? "compare.secondModel" : "checkpoint"), models, (value) => app.set({ model: Number(value) })),
      this.field("row", app.t("compare.row"), Dom.el("input", { type: "number", min: 0, step: 1, oninput: (event) => app.set({ row: Math.round(event.target.valueAsNumber) || 0 }) })),
      this.select("head", app.t("head"), heads, (value) => app.set({ layer: Math.floor(value / sizes.n_head), head: value % sizes.n_head })),
      kind === "reference" && references("reference", app.t("reference")),
      kind === "change" && [
        references("instead", app.t("compare.instead"), [["off", app.t("compare.off")]]),
        Dom.el("button", { type: "button", onclick: () => this.addChange(app) }, app.t("compare.add")),
      ]);
  },

  field(name, label, node) {
    this.fields[name] = node;
    return Dom.el("label", { class: node.tagName === "TEXTAREA" ? "wide" : null }, label, node);
  },

  select(name, label, options, choose) {
    return this.field(name, label, Dom.el("select", { onchange: (event) => choose(event.target.value) },
      options.map(([value, shown]) => Dom.el("option", { value }, shown))));
  },

  later(act) {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(act, 120);
  },

  fillIn(app) {
    const { state, engine } = app;
    const values = {
      text: state.text, second: this.second(app), model: state.model, other: this.other(app), head: state.layer * engine.sizes.n_head + state.head,
      row: state.row, reference: this.reference(app), instead: this.instead(app),
    };
    for (const [name, field] of Object.entries(this.fields)) if (field !== document.activeElement) field.value = values[name];
  },

  second(app) {
    return app.state.second ?? app.payload.texts?.[1] ?? app.state.text;
  },

  other(app) {
    const last = app.engines.length - 1;
    return Math.max(0, Math.min(last, app.state.other ?? (app.state.model === last ? 0 : last)));
  },

  reference(app) {
    return References.names.includes(app.state.reference) ? app.state.reference : "previous";
  },

  instead(app) {
    return References.names.includes(app.state.instead) ? app.state.instead : "off";
  },

  // ── two texts ────────────────────────────────────────────────────────────────────────────────────────────

  async show_texts(app) {
    const { engine, trace, state, tokenizer } = app, text = this.second(app);
    const ids = (engine.canType ? tokenizer.encode(text) : engine.ids(text)).slice(0, engine.contextLength);
    if (!ids.length) throw new Error(app.t("empty"));
    const second = await engine.trace(ids);
    const [shared, size] = [Math.min(trace.length, second.length), Math.max(trace.length, second.length)];
    let same = 0;
    while (same < shared && trace.ids[same] === second.ids[same]) same++;
    const rows = [trace, second].map((one) => this.rowsOf(one, state));
    return {
      said: this.told(app, trace, second, same),
      body: [
        this.maps(app, [
          { title: app.t("compare.first"), size, length: trace.length, row: rows[0], ids: trace.ids },
          { title: app.t("compare.second"), size, length: second.length, row: rows[1], ids: second.ids },
          { title: app.t("compare.secondMinus"), size, length: shared, row: this.minus(rows[1], rows[0]), ids: second.ids, signed: true },
        ]),
        this.besides(app, trace, second, rows, same),
      ],
    };
  },

  /** What rows can't see, and so can't tell the texts apart. */
  told(app, first, second, same) {
    const { tokenizer } = app, shown = (trace, t) => (t < trace.length ? tokenizer.show(trace.ids[t]) : app.t("compare.end"));
    if (same === first.length && same === second.length) return app.t("compare.sameText");
    const parts = { n: same, a: shown(first, same), b: shown(second, same) };
    const before = same && app.t("compare.cannotSee", { ...parts, row: tokenizer.show(first.ids[same - 1]), place: same - 1 });
    return [before, app.t("compare.fromThere", parts)].filter(Boolean).join(" ");
  },

  /** Tokens of both texts, place by place, and how far their rows are apart. */
  besides(app, first, second, rows, same) {
    const { tokenizer } = app, length = Math.max(first.length, second.length);
    const shown = (trace, t) => (t < trace.length ? tokenizer.show(trace.ids[t]) : "");
    const table = Array.from({ length }, (_, t) => {
      const there = t < first.length && t < second.length;
      return [
        t, shown(first, t), shown(second, t), there ? (first.ids[t] === second.ids[t] ? "=" : "≠") : "",
        there ? Dom.number(half(rows[0](t), rows[1](t)), 4) : "–", t < same ? app.t("compare.blind") : "",
      ];
    });
    return Dom.table([app.t("place"), app.t("compare.first"), app.t("compare.second"), "", app.t("tv"), ""], table, app.t("compare.aligned"));

    function half(a, b) {
      return a.reduce((sum, x, s) => sum + Math.abs(x - b[s]) / 2, 0);
    }
  },

  // ── two checkpoints ──────────────────────────────────────────────────────────────────────────────────────

  async show_checkpoints(app) {
    const { trace, engine, state } = app, other = app.engines[this.other(app)];
    const traces = [await other.trace(trace.ids), trace], names = [other.name, engine.name];
    const rows = traces.map((one) => this.rowsOf(one, state));
    return {
      said: this.losses(app, traces, names),
      body: [
        this.maps(app, [
          ...rows.map((row, i) => ({ title: names[i], length: trace.length, row, ids: trace.ids })),
          { title: `${names[1]} − ${names[0]}`, length: trace.length, ids: trace.ids, signed: true, row: this.minus(rows[1], rows[0]) },
        ]),
        this.guesses(app, traces, names, state.row),
      ],
    };
  },

  /** "loss 1.234 → 0.987". */
  losses(app, traces, names) {
    const [first, second] = traces.map((trace) => this.loss(trace));
    return app.t("compare.losses", {
      first: Dom.number(first), second: Dom.number(second), change: Dom.number(second - first), a: names[0], b: names[1], n: traces[0].length - 1,
    });
  },

  /** Mean loss in nats a token. */
  loss(trace) {
    const losses = Array.from({ length: trace.length - 1 }, (_, t) => trace.loss(t));
    return losses.reduce((sum, x) => sum + x, 0) / losses.length;
  },

  /** The likeliest next tokens of both at one row, as bars and as a table. */
  guesses(app, traces, names, t) {
    const shares = traces.map((trace) => trace.shares(t));
    const likeliest = (p) => Array.from(p.keys()).sort((a, b) => p[b] - p[a] || a - b).slice(0, this.TOP);
    const ids = [...new Set([...likeliest(shares[0]), ...likeliest(shares[1])])].sort((a, b) => Math.max(shares[0][b], shares[1][b]) - Math.max(shares[0][a], shares[1][a]));
    const rows = ids.map((id) => [app.tokenizer.show(id), shares[0][id], shares[1][id]]);
    return [
      Dom.el("h3", {}, app.t("compare.next", { place: app.place(t) })),
      nextView.bars(rows, names),
      Dom.asTable(app.t("table"), () => Dom.table([app.t("token"), ...names], rows.map(([token, a, b]) => [token, Dom.percent(a, 2), Dom.percent(b, 2)]))),
    ];
  },

  // ── a head and a pattern ─────────────────────────────────────────────────────────────────────────────────

  async show_reference(app) {
    const { trace, state } = app, name = this.reference(app), wanted = References.pattern(name, trace.ids, app.tokenizer);
    const own = this.rowsOf(trace, state), close = References.closeness(own, wanted, trace.length);
    const numbers = ["tv", "mass", "agreement", "coverage", "lift"];
    return {
      said: app.t("compare.defined", { name, rows: wanted.filter(Boolean).length, all: trace.length - 1 }),
      body: [
        this.maps(app, [
          { title: app.t("compare.learned"), length: trace.length, row: own, ids: trace.ids },
          { title: name, length: trace.length, row: (t) => wanted[t], ids: trace.ids },
          { title: app.t("compare.learnedMinus", { name }), length: trace.length, row: this.minus(own, (t) => wanted[t]), ids: trace.ids, signed: true },
        ]),
        Dom.table(numbers.map((key) => app.t(key)), [numbers.map((key) => Dom.number(close[key]))], app.t("compare.closeness", { name })),
      ],
    };
  },

  // ── some heads changed ───────────────────────────────────────────────────────────────────────────────────

  /** The changes of the state: [{layer, head, instead}], those alone that the model can make. */
  changes(app) {
    const { sizes } = app.engine;
    return String(app.state.changes ?? "").split(",").flatMap((one) => {
      const [, layer, head, instead] = /^(\d+)\.(\d+)=(.+)$/.exec(one) ?? [];
      const known = instead === "off" || References.names.includes(instead);
      return known && layer < sizes.n_layer && head < sizes.n_head ? [{ layer: Number(layer), head: Number(head), instead }] : [];
    });
  },

  setChanges(app, changes) {
    app.set({ changes: changes.map(({ layer, head, instead }) => `${layer}.${head}=${instead}`).join(",") });
  },

  addChange(app) {
    const { layer, head } = app.state, others = this.changes(app).filter((one) => one.layer !== layer || one.head !== head);
    this.setChanges(app, [...others, { layer, head, instead: this.instead(app) }]);
  },

  async show_change(app) {
    const { trace, state } = app, changes = this.changes(app), names = [app.t("compare.before"), app.t("compare.after")];
    const changed = await app.engine.trace(trace.ids, changes.map(({ layer, head, instead }) => {
      if (instead === "off") return { layer, head, off: true };
      const pattern = References.pattern(instead, trace.ids, app.tokenizer);
      return { layer, head, weights: (t) => pattern[t] };
    }));
    const isOff = changes.some(({ layer, head, instead }) => instead === "off" && layer === state.layer && head === state.head);
    const rows = [this.rowsOf(trace, state), isOff ? (t) => new Float64Array(t + 1) : this.rowsOf(changed, state)];
    return {
      said: changes.length ? this.losses(app, [trace, changed], names) : app.t("compare.unchanged"),
      body: [
        this.list(app, changes),
        this.guesses(app, [trace, changed], names, trace.length - 1),
        this.maps(app, [
          ...rows.map((row, i) => ({ title: names[i], length: trace.length, row, ids: trace.ids })),
          { title: app.t("compare.afterMinus"), length: trace.length, row: this.minus(rows[1], rows[0]), ids: trace.ids, signed: true },
        ]),
      ],
    };
  },

  list(app, changes) {
    const { el } = Dom, remove = (gone) => {
      this.setChanges(app, changes.filter((one) => one !== gone));
      this.fields.instead.focus();
    };
    if (!changes.length) return null;
    return Dom.table([app.t("head"), app.t("compare.instead"), ""], changes.map((one) => [
      `L${one.layer}H${one.head}`, one.instead === "off" ? app.t("compare.off") : one.instead,
      el("button", { type: "button", "aria-label": `${app.t("compare.remove")} L${one.layer}H${one.head}`, onclick: () => remove(one) }, app.t("compare.remove")),
    ]), app.t("compare.list"));
  },

  // ── maps ─────────────────────────────────────────────────────────────────────────────────────────────────

  /** The chosen head's weights, row by row. */
  rowsOf(trace, { layer, head }) {
    return (t) => trace.weights(layer, head, t);
  },

  /** Row by row a − b; null where either is. */
  minus(a, b) {
    return (t) => {
      const [left, right] = [a(t), b(t)];
      return left && right && Float64Array.from(left, (x, s) => x - right[s]);
    };
  },

  /** Maps side by side, and the scales. */
  maps(app, pictures) {
    return [
      Dom.el("div", { class: "columns" }, pictures.map((picture) => this.figure(app, picture))),
      Dom.el("div", { class: "controls" }, Dom.scale(false, app.t("weight")), this.signedScale(app.t("compare.difference"))),
    ];
  },

  /**
   * One map, which tells the cell under the pointer; a press chooses its row. What is masked or not defined is hatched.
   * @param {{title: string, ids: number[], length: number, row: function(number): ?ArrayLike<number>, signed: boolean, size: number, still: boolean}} picture
   *   size: tokens that it has room for, length unless given; still: whether no row is chosen on it
   */
  figure(app, picture) {
    const { el } = Dom, { length, title, ids, size = length, still } = picture, chosen = app.state.row;
    const canvas = el("canvas", { class: "map hatched", role: "img", "aria-label": title });
    const told = el("p", { class: "said quiet" }), shown = (i) => `${i} ${app.tokenizer.show(ids[i])}`;
    this.paint(canvas, picture);
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const place = (x, all) => Math.max(0, Math.min(length - 1, Math.floor((size * x) / all)));
      return [place(event.clientY - box.top, box.height), place(event.clientX - box.left, box.width)];
    };
    const tell = (event) => {
      const [t, s] = at(event), row = s <= t && picture.row(t);
      told.textContent = row ? app.t("compare.cell", { row: shown(t), key: shown(s), x: Dom.number(row[s]) }) : "";
    };
    const percent = (x) => `${(100 * x) / size}%`;
    return el("figure", {},
      el("figcaption", {}, title, " ", Dom.copyButtons({ csv: () => this.csv(picture), png: () => canvas }, (copied) => (told.textContent = app.t(copied ? "copied" : "saved")))),
      el("div", { class: "map-frame", onpointermove: tell, onclick: (event) => !still && app.set({ row: at(event)[0] }) }, canvas,
        !still && chosen < length && el("div", { class: "mark", style: { left: 0, top: percent(chosen), height: percent(1), width: percent(chosen + 1) } })),
      told,
      Dom.asTable(app.t("table"), () => Dom.table(["", ...Array.from({ length }, (_, s) => shown(s))],
        Array.from({ length }, (_, t) => [shown(t), ...Array.from(picture.row(t) ?? [], (x) => Dom.number(x))]), title)));
  },

  csv({ length, row }) {
    return Dom.csv(Array.from({ length }, (_, t) => [t, ...(row(t) ?? [])]));
  },

  /** Each defined row of a map as pixels. */
  paint(canvas, { length, row, signed, size = length }) {
    canvas.width = canvas.height = Math.max(1, size);
    const picture = canvas.getContext("2d"), image = picture.createImageData(canvas.width, canvas.height);
    const colour = signed ? this.signedColours() : this.colours();
    for (let t = 0; t < length; t++) {
      const values = row(t);
      for (let s = 0; values && s <= t; s++) image.data.set(colour(values[s]), 4 * (t * size + s));
    }
    picture.putImageData(image, 0, 0);
  },

  colours() {
    const shades = Dom.shades();
    return (x) => [...shades[Math.round(255 * (Math.max(0, Math.min(1, x)) || 0))], 255];
  },

  /** −1 … 1: from one hue over the paper to another, for the theme in use. */
  signedColours() {
    const style = getComputedStyle(document.documentElement);
    const [paper, plus, minus] = ["--paper", "--accent", "--negative"].map((name) =>
      style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((digits) => parseInt(digits, 16)));
    return (x) => {
      const share = Math.min(1, Math.abs(x) || 0), end = x < 0 ? minus : plus;
      return [...paper.map((from, i) => Math.round(from + (end[i] - from) * share)), 255];
    };
  },

  signedScale(label) {
    const canvas = Dom.el("canvas", { width: 255, height: 1, "aria-hidden": "true" });
    const picture = canvas.getContext("2d"), image = picture.createImageData(255, 1), colour = this.signedColours();
    for (let i = 0; i < 255; i++) image.data.set(colour((i - 127) / 127), 4 * i);
    picture.putImageData(image, 0, 0);
    return Dom.el("div", { class: "scale" }, "−1", canvas, "1", Dom.el("span", {}, label));
  },
};
