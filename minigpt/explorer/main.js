/** Reads the payload, makes the engines, lays out the tabs, and listens to the keyboard. */
const Main = {
  VIEWS: [tokensView, headsView, headView, rowView, streamView, nextView, workedView, compareView, filmView],
  TABS: ["look", "worked", "compare", "film"],

  async start() {
    const payload = JSON.parse(document.getElementById("payload").textContent);
    const engines = await Main.engines(payload);
    const tokenizer = payload.tokenizer && Tokenizer.of(payload.tokenizer);
    const app = new App(payload, engines, tokenizer, Main.VIEWS);
    document.title = payload.title;
    window.app = app; // for whoever looks in from the console, and for tests
    Main.layOut(app);
    app.onchange = (changed) => {
      document.body.classList.toggle("stale", Boolean(app.stale && app.trace));
      return changed.has("lang") ? Main.layOut(app) : changed.has("tab") && Main.turnTo(app);
    };
    addEventListener("hashchange", () => app.set(app.fromAddress()));
    addEventListener("keydown", (event) => Main.press(app, event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.tell(new Set(["trace"])));
    await app.retrace();
  },

  async engines(payload) {
    if (payload.server || !payload.models.length) return Captured.engines(payload);
    return Promise.all(payload.models.map((entry) => Model.of(entry)));
  },

  tabs(app) {
    const there = { look: app.engines.length, worked: true, compare: app.engines.length, film: app.payload.film };
    return Main.TABS.filter((name) => there[name]);
  },

  layOut(app) {
    const { el } = Dom, run = app.payload.run;
    document.documentElement.lang = app.state.lang;
    Main.main = el("main", { id: "main" });
    Main.buttons = Main.tabs(app).map((name) =>
      el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "main", onclick: () => app.set({ tab: name }) },
        app.t(`tab.${name}`)));
    Main.keys = el("dialog", { "aria-label": app.t("keys") },
      el("h2", {}, app.t("keys")),
      Dom.table([app.t("key"), app.t("does")], ["[ ]", "{ }", ", .", "1 … 6", "?"].map((key, i) => [el("kbd", {}, key), app.t(`keys.${i}`)])),
      el("form", { method: "dialog" }, el("button", {}, app.t("close"))));
    document.querySelectorAll("header, main, footer, dialog").forEach((node) => node.remove());
    document.body.prepend(
      el("header", {},
        el("h1", {}, app.payload.title),
        run && el("span", { class: "quiet" }, app.t("run", { ...run, parameters: run.parameters.toLocaleString(app.state.lang), loss: Dom.number(run.val_loss, 4) })),
        el("span", { class: "spacer" }),
        el("button", { type: "button", onclick: () => app.set({ lang: app.state.lang === "ja" ? "en" : "ja" }) }, app.state.lang === "ja" ? "English" : "日本語"),
        el("button", { type: "button", onclick: () => Main.keys.showModal(), "aria-keyshortcuts": "?" }, app.t("keys"))),
      el("main", { style: { paddingBottom: "0" } }, el("div", { role: "tablist", "aria-label": app.t("tabs"), onkeydown: (event) => Main.pressTab(app, event) }, Main.buttons)),
      Main.main,
      el("footer", { class: "quiet" }, el("p", {}, app.t("limits"))),
      Main.keys);
    Main.turnTo(app);
  },

  /** Build the views of the tab that is open. */
  turnTo(app) {
    if (!Main.tabs(app).includes(app.state.tab)) app.state.tab = Main.tabs(app)[0];
    for (const button of Main.buttons) {
      const open = button.id === `tab-${app.state.tab}`;
      button.setAttribute("aria-selected", open);
      button.tabIndex = open ? 0 : -1; // the others are reached by arrows
    }
    Main.main.replaceChildren();
    for (const view of app.views) {
      view.root = view.stale = null;
      if (view.tab !== app.state.tab) continue;
      view.root = Dom.el("section", { id: view.name, "aria-label": app.t(`${view.name}.title`) });
      Main.main.append(view.root);
      view.create(view.root, app);
      view.update(app, new Set(["trace", ...Object.keys(app.state)]));
    }
  },

  /** Arrows, Home and End turn to another tab. */
  async pressTab(app, event) {
    const names = Main.tabs(app), at = names.indexOf(app.state.tab), last = names.length - 1;
    const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    await app.set({ tab: names[to] });
    document.getElementById(`tab-${names[to]}`).focus();
  },

  press(app, event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog[open]")) return;
    const { state, engine, trace } = app, heads = engine?.sizes.n_head;
    if (event.key === "?") Main.keys.showModal();
    else if (state.tab !== "look" || !trace) return;
    else if (event.key === "[" || event.key === "]") {
      const n = heads * engine.sizes.n_layer, at = state.layer * heads + state.head;
      const next = (at + (event.key === "]" ? 1 : n - 1)) % n;
      app.set({ layer: Math.floor(next / heads), head: next % heads });
    } else if (event.key === "{" || event.key === "}") {
      app.set({ key: Math.max(0, Math.min(state.row, state.key + (event.key === "}" ? 1 : -1))) });
    } else if (event.key === "," || event.key === ".") {
      app.set({ row: Math.max(0, Math.min(trace.length - 1, state.row + (event.key === "." ? 1 : -1))) });
    } else if (event.key >= "1" && event.key <= "6") app.set({ step: Number(event.key) });
    else return;
    event.preventDefault();
  },
};

Main.start();
