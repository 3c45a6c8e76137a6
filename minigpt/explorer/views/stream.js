/** What the model would say next if it ended after each block. */
const streamView = {
  name: "stream",
  tab: "look",
  N_GUESS: 4,

  create(root, app) {
    this.table = Dom.el("div");
    root.append(Dom.el("h2", {}, app.t("stream.title")), Dom.el("p", {}, app.t("stream.about")), this.table);
  },

  update(app, changed) {
    const { trace, state } = app;
    if (!trace || !(changed.has("trace") || changed.has("row"))) return;
    const next = trace.ids[state.row + 1], depths = Array.from({ length: app.engine.sizes.n_layer + 1 }, (_, depth) => depth);
    const guess = ({ id, p }) => Dom.el("span", { class: id === next ? "mono" : "mono quiet" }, `${app.tokenizer.show(id)} ${Dom.percent(p)} `, Dom.bar(p));
    Dom.show(this.table,
      Dom.table([app.t("depth"), ...Array.from({ length: this.N_GUESS }, (_, i) => `${app.t("guess")} ${i + 1}`)],
        depths.map((depth) => [depth ? app.t("stream.after", { n: depth - 1 }) : app.t("stream.after0"), ...trace.guesses(depth, state.row, this.N_GUESS).map(guess)])),
      Dom.el("p", { class: "quiet" }, next === undefined ? app.t("stream.none") : `${app.t("stream.truth")}: ${app.tokenizer.show(next)} (${Dom.percent(Math.exp(-trace.loss(state.row)))})`));
  },
};
