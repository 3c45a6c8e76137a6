/** The text and its tokens; choosing one chooses the row that the rest is about. */
const tokensView = {
  name: "tokens",
  tab: "look",

  create(root, app) {
    const { el } = Dom, { engine } = app;
    this.input = engine.canType
      ? el("textarea", { id: "text", rows: 3, spellcheck: "false", oninput: () => app.set({ text: this.input.value }) })
      : el("select", { id: "text", onchange: () => app.set({ text: this.input.value }) },
        engine.texts.map((text) => el("option", { value: text }, text.slice(0, 80))));
    this.model = el("select", { id: "model", onchange: () => app.set({ model: this.model.selectedIndex }) },
      app.engines.map((each) => el("option", {}, each.name)));
    this.mistake = el("p", { class: "mistake", role: "status" });
    this.chips = el("div", { class: "tokens", role: "group", "aria-label": app.t("tokens.title"), onkeydown: (event) => this.move(app, event) });
    this.said = el("p", { class: "quiet said", role: "status" });
    const rounded = app.payload.models.filter(({ precision }) => precision === "f16").map(({ name }) => name).join(", ");
    Dom.show(root,
      el("h2", {}, app.t("tokens.title")),
      el("p", {}, app.t("tokens.about")),
      app.engines.length > 1 && el("div", { class: "controls" }, el("label", {}, app.t("checkpoint"), this.model)),
      el("label", { for: "text" }, app.t(engine.canType ? "tokens.label" : "tokens.given")),
      this.input,
      this.mistake,
      this.chips,
      this.said,
      !app.payload.models.length && el("p", { class: "quiet" }, app.t("captured16")),
      rounded && el("p", { class: "quiet" }, app.t("rounded", { names: rounded })),
      Dom.asTable(app.t("table"), () => this.table(app)));
  },

  update(app, changed) {
    const { state, trace } = app;
    if (this.input.value !== state.text) this.input.value = state.text;
    this.model.selectedIndex = state.model;
    this.mistake.textContent = app.stale && trace ? `${app.mistake} ${app.t("stale")}` : app.mistake;
    if (!trace) return;
    if (changed.has("trace")) {
      Dom.show(this.chips, Array.from(trace.ids, (id, t) => Dom.el("button", {
        type: "button", class: "token", tabindex: -1, "data-place": t, onclick: () => app.set({ row: t }),
      }, app.tokenizer.show(id), Dom.el("small", {}, id))));
      this.shown = -1;
    }
    this.chips.children[this.shown]?.setAttribute("aria-pressed", "false");
    this.chips.children[this.shown]?.setAttribute("tabindex", "-1");
    const chosen = this.chips.children[(this.shown = state.row)];
    chosen.setAttribute("aria-pressed", "true");
    chosen.setAttribute("tabindex", "0");
    if (this.chips.contains(document.activeElement)) chosen.focus();
    const id = trace.ids[state.row];
    this.said.textContent = app.t("tokens.count", {
      n: trace.length, most: app.engine.contextLength, place: app.place(state.row), id, bytes: this.bytes(app, id),
    });
  },

  bytes(app, id) {
    return Array.from(app.tokenizer.bytes(id), (byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ") || "–";
  },

  table(app) {
    const rows = Array.from(app.trace.ids, (id, t) => [t, app.tokenizer.show(id), id, this.bytes(app, id)]);
    return Dom.table([app.t("place"), app.t("token"), app.t("id"), app.t("bytes")], rows);
  },

  move(app, event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by) return;
    event.preventDefault();
    app.set({ row: Math.max(0, Math.min(app.trace.length - 1, app.state.row + by)) });
  },
};
