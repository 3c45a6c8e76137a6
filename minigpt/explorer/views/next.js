/** The next token at the chosen row: the whole distribution, each rule of the sampling law, and the draw. */
const nextView = {
  name: "next",
  tab: "look",
  SHOWN: 20,
  PAGE: 500,
  MOST_DRAWS: 100_000,
  /** The law's numbers: what generate.py takes when nothing is said, and what they may be. */
  LAW: {
    temperature: { usual: 0.8, from: 0, to: 3, step: 0.05 },
    topK: { usual: 0, from: 0, to: null, step: 1 },
    topP: { usual: 1, from: 0.01, to: 1, step: 0.01 },
    minP: { usual: 0, from: 0, to: 0.99, step: 0.01 },
  },
  WATCHED: ["trace", "row", "temperature", "topK", "topP", "minP", "seed", "drawn", "held", "all", "mistake"],

  create(root, app) {
    const { el } = Dom;
    this.page = 0;
    this.inputs = {};
    this.title = el("h2");
    this.law = el("p", { class: "formula" });
    this.draw = el("div");
    this.chart = el("div");
    this.all = el("div");
    this.said = el("p", { class: "said", role: "status" });
    this.seed = el("input", {
      type: "number", min: 0, step: 1, onchange: (event) => app.set({ seed: this.digits(event.target.value), drawn: 0, held: 0 }),
    });
    this.drawButton = el("button", { type: "button", onclick: () => app.set({ drawn: this.drawn(app) + 1, held: 1 }) }, app.t("next.draw"));
    this.appendButton = el("button", { type: "button", onclick: () => this.append(app) }, app.t("next.append"));
    Dom.show(root,
      this.title,
      el("p", {}, app.t("next.about")),
      el("div", { class: "controls" }, Object.keys(this.LAW).map((name) => this.slider(app, name)),
        el("button", { type: "button", onclick: () => app.set(Object.fromEntries(Object.keys(this.LAW).map((name) => [name, null]))) },
          app.t("next.usual"))),
      this.law,
      el("div", { class: "controls" },
        el("label", {}, app.t("next.seed"), this.seed), this.drawButton, this.appendButton,
        el("button", { type: "button", onclick: () => app.set({ drawn: 0, held: 0 }) }, app.t("next.again"))),
      el("p", { class: "quiet" }, app.t("next.like")),
      this.said,
      this.draw,
      el("div", { class: "columns" }, this.chart, this.all));
  },

  /** A slider and a field of one number of the law. */
  slider(app, name) {
    const { from, to, step } = this.LAW[name], limits = { min: from, max: to ?? app.tokenizer.vocabSize, step };
    const set = (event) => app.set({ [name]: event.target.value === "" ? null : Number(event.target.value) });
    const range = Dom.el("input", { type: "range", "aria-label": app.t(`next.${name}`), ...limits, oninput: set });
    const field = Dom.el("input", { type: "number", ...limits, oninput: set, onchange: () => (field.value = this.options(app)[name]) });
    this.inputs[name] = [range, field];
    return Dom.el("span", { class: "controls" }, Dom.el("label", {}, app.t(`next.${name}`), field), range);
  },

  /** What the state says, within what may be: the address may hold anything. */
  options(app) {
    const read = ([name, { usual, from, to }]) => {
      const said = app.state[name], x = said === "" || said == null ? usual : Number(said);
      return [name, Number.isFinite(x) ? Math.max(from, Math.min(to ?? app.tokenizer.vocabSize, x)) : usual];
    };
    const options = Object.fromEntries(Object.entries(this.LAW).map(read));
    return { ...options, topK: Math.round(options.topK), repetitionPenalty: 1 };
  },

  /** A seed of any length; what is none is 0. */
  digits(text) {
    return /^\d+$/.test(String(text ?? "")) ? String(text) : "0";
  },

  whole(text) {
    return Math.max(0, Math.round(Number(text)) || 0);
  },

  drawn(app) {
    return Math.min(this.MOST_DRAWS, this.whole(app.state.drawn ?? 0));
  },

  update(app, changed) {
    if (!this.WATCHED.some((name) => changed.has(name)) || !app.trace) return;
    const { state, trace } = app, options = this.options(app);
    this.title.textContent = `${app.t("next.title")}: ${app.place(state.row)}`;
    for (const name of Object.keys(this.LAW)) {
      for (const input of this.inputs[name]) if (input !== document.activeElement) input.value = options[name];
    }
    if (this.seed !== document.activeElement) this.seed.value = this.digits(state.seed);
    try {
      this.found = this.distribution(app, trace.logits(state.row), options);
    } catch (error) {
      this.said.textContent = error.message;
      return Dom.show(this.draw), Dom.show(this.chart), Dom.show(this.all);
    }
    const law = this.found.partial ? "next.partial" : options.temperature ? "next.law" : "next.greedyLaw";
    this.law.textContent = app.t(law, { ...options, kept: this.found.kept, all: app.tokenizer.vocabSize });
    this.drawButton.disabled = this.found.partial;
    this.showDraw(app);
    this.showChart(app);
    this.showTable(app);
  },

  /** The distribution, and the ids from the likeliest on. */
  distribution(app, logits, options) {
    if (logits.some(Number.isNaN)) return this.captured(app, logits);
    const law = Sampling.distribution(logits, options, app.trace.ids, app.tokenizer.undefinedIds);
    const plain = Attention.softmax(Array.from(logits));
    const order = Array.from(logits, (_, id) => id).sort((a, b) => logits[b] - logits[a] || a - b);
    return { ...law, logits, plain, order, options, kept: law.probabilities.reduce((n, p) => n + (p > 0), 0) };
  },

  /** Of a page that carries the largest logits alone: the model's own probabilities of those, and no rules. */
  captured(app, logits) {
    const plain = app.trace.shares(app.state.row), known = Array.from(logits, (_, id) => id).filter((id) => !Number.isNaN(logits[id]));
    const order = known.sort((a, b) => logits[b] - logits[a] || a - b);
    return { logits, plain, probabilities: plain, tempered: plain, cut: [], order, options: { temperature: 1 }, kept: order.length, partial: true };
  },

  // ── the draw ─────────────────────────────────────────────────────────────────────────────────────────────

  /** The uniform of the n-th token since the seed was set. */
  uniform(app) {
    const next = Sampling.uniforms(this.digits(app.state.seed));
    let u = NaN;
    for (let n = this.drawn(app); n > 0; n--) u = next();
    return u;
  },

  showDraw(app) {
    const { el } = Dom, { state, trace } = app, held = Number(state.held) === 1 && this.drawn(app) > 0 && !this.found.partial;
    const full = trace.length >= app.engine.contextLength;
    this.appendButton.disabled = !held || !app.engine.canType || state.row !== trace.length - 1 || full;
    if (!held) {
      this.said.textContent = this.notice ?? app.t("next.undrawn", { n: this.drawn(app) + 1 });
      this.notice = null;
      return Dom.show(this.draw);
    }
    const { probabilities } = this.found, u = this.uniform(app), id = Sampling.draw(probabilities, u);
    let before = 0;
    for (let i = 0; i < id; i++) before += probabilities[i];
    this.chosen = id;
    const why = app.engine.canType && (full ? app.t("next.full") : state.row !== trace.length - 1 && app.t("next.notLast"));
    this.said.textContent = [
      app.t("next.drawn", {
        n: this.drawn(app), seed: this.digits(state.seed), u: Dom.number(u, 6), token: app.tokenizer.show(id), id,
        from: Dom.number(before, 6), to: Dom.number(before + probabilities[id], 6),
      }), why,
    ].filter(Boolean).join(" ");
    return Dom.show(this.draw, el("figure", {}, this.strip(app, u, id), el("figcaption", {}, app.t("next.strip"))),
      Dom.asTable(app.t("table"), () => this.cumulated(app)));
  },

  /** [first id, last id, from, to] of the parts of [0, 1), in id order; parts too thin to see are put together. */
  parts(thin) {
    const { probabilities } = this.found, parts = [];
    let total = 0;
    probabilities.forEach((p, id) => {
      if (!(p > 0)) return;
      const last = parts.at(-1);
      if (last && p < thin && last[3] - last[2] < thin && last[1] !== this.chosen && id !== this.chosen) [last[1], last[3]] = [id, total + p];
      else parts.push([id, id, total, total + p]);
      total += p;
    });
    return parts;
  },

  strip(app, u, chosen) {
    const { svg } = Dom, percent = (x) => `${100 * x}%`;
    const parts = this.parts(0.002).map(([first, last, from, to], i) => svg("rect", {
      x: percent(from), y: 16, width: percent(to - from), height: 22, fill: first === chosen ? "var(--accent)" : i % 2 ? "var(--line)" : "var(--bar)",
    }, svg("title", {}, first === last ? app.tokenizer.show(first) : `${app.tokenizer.show(first)} … ${app.tokenizer.show(last)}`)));
    return svg("svg", { width: "100%", height: 56, role: "img", "aria-label": app.t("next.strip") }, parts,
      svg("line", { x1: percent(u), x2: percent(u), y1: 10, y2: 44, stroke: "var(--negative)", "stroke-width": 3 }),
      svg("text", { x: percent(u), y: 10, "text-anchor": u < 0.5 ? "start" : "end" }, `u = ${Dom.number(u, 4)}`),
      svg("text", { x: 0, y: 54 }, "0"), svg("text", { x: "100%", y: 54, "text-anchor": "end" }, "1"));
  },

  cumulated(app) {
    const rows = this.parts(0).slice(0, this.PAGE).map(([id, , from, to]) =>
      [app.tokenizer.show(id), id, Dom.number(from, 6), Dom.number(to, 6)]);
    return Dom.table([app.t("token"), app.t("id"), app.t("next.from"), app.t("next.to")], rows, app.t("next.strip"));
  },

  /** Put what was drawn behind the text; if the text reads otherwise than it was written, say so. */
  async append(app) {
    const { tokenizer, trace } = app, id = this.chosen, ids = [...trace.ids, id];
    if (id === app.payload.tokenizer.end) {
      this.notice = app.t("next.ended");
      return app.set({ held: 0 });
    }
    const text = tokenizer.decode(ids);
    let read = [];
    try {
      read = tokenizer.encode(text);
    } catch {
      // a piece of a character is no text of its own
    }
    const same = read.length === ids.length && read.every((one, i) => one === ids[i]);
    this.notice = same ? app.t("next.appended", { token: tokenizer.show(id) }) : app.t("next.otherIds", {
      token: tokenizer.show(id), wrote: this.tail(app, ids), read: this.tail(app, read),
    });
    await app.set({ held: 0, text }); // the last row stays the last
  },

  tail(app, ids) {
    return ids.slice(-4).map((id) => app.tokenizer.show(id)).join(" · ");
  },

  // ── the picture and the table ────────────────────────────────────────────────────────────────────────────

  showChart(app) {
    const { order, plain, probabilities } = this.found, ids = order.slice(0, this.SHOWN);
    const rows = ids.map((id) => [app.tokenizer.show(id), plain[id], probabilities[id]]);
    const names = [app.t("next.before"), app.t("next.after")];
    const chart = this.bars(rows, names);
    Dom.show(this.chart,
      Dom.el("h3", {}, app.t("next.chart", { n: ids.length }), " ",
        Dom.copyButtons({
          csv: () => Dom.csv([["token", ...names], ...rows]),
          svg: () => Dom.svgText(chart),
        }, (copied) => (this.said.textContent = app.t(copied ? "copied" : "saved")))),
      chart,
      Dom.asTable(app.t("table"), () => Dom.table([app.t("token"), ...names],
        rows.map(([token, before, after]) => [token, Dom.percent(before, 2), Dom.percent(after, 2)]))));
  },

  /** Two bars a token: [label, before, after] rows of shares in [0, 1]; also what compare draws with. */
  bars(rows, names) {
    const { svg } = Dom, high = 22, left = 90, width = 440, room = width - left - 110, label = names.join(" / ");
    const largest = Math.max(1e-12, ...rows.flatMap(([, before, after]) => [before, after]));
    const bar = (x, y, colour) => svg("rect", { x: left, y, width: room * (x / largest), height: 8, fill: colour });
    const colours = ["#8a94a3", "#3b82c4"];
    return svg("svg", { viewBox: `0 0 ${width} ${high * rows.length + 20}`, width: "100%", style: { maxWidth: "32rem" }, role: "img", "aria-label": label },
      names.map((name, i) => [
        svg("rect", { x: left + 170 * i, y: 3, width: 10, height: 8, fill: colours[i] }),
        svg("text", { x: left + 14 + 170 * i, y: 11 }, name),
      ]),
      rows.map(([token, before, after], i) => {
        const y = 20 + high * i, end = left + room * (Math.max(before, after) / largest) + 4;
        return [
          svg("text", { x: left - 6, y: y + 13, "text-anchor": "end" }, [...token].slice(0, 11).join("")),
          bar(before, y, colours[0]), bar(after, y + 9, colours[1]), svg("text", { x: end, y: y + 13 }, `${(100 * before).toFixed(1)} → ${(100 * after).toFixed(1)} %`),
        ];
      }));
  },

  showTable(app) {
    const { el } = Dom, { order } = this.found, all = Number(app.state.all) === 1 && order.length > this.SHOWN;
    const size = all ? this.PAGE : this.SHOWN, pages = Math.ceil(order.length / size);
    this.page = all ? Math.min(this.page, pages - 1) : 0;
    const turn = (by) => {
      this.page += by;
      this.showTable(app);
      this.all.querySelector(`[data-by="${by}"]:not(:disabled), [data-by]:not(:disabled)`)?.focus();
    };
    const button = (by, key) => el("button", {
      type: "button", "data-by": by, disabled: this.page + by < 0 || this.page + by >= pages, onclick: () => turn(by),
    }, app.t(key));
    const toggle = el("button", { type: "button", "aria-pressed": String(all), onclick: () => app.set({ all: all ? 0 : 1 }) },
      app.t(all ? "next.fewer" : "next.all", { n: order.length }));
    const focused = document.activeElement?.classList.contains("next-all");
    toggle.classList.add("next-all");
    Dom.show(this.all,
      el("h3", {}, app.t("next.table"), " ",
        Dom.copyButtons({ csv: () => this.csv(app) }, (copied) => (this.said.textContent = app.t(copied ? "copied" : "saved")))),
      Dom.table(["token", "id", "next.logit", "next.tempered", "next.rule", "next.final"].map((key) => app.t(key)),
        order.slice(size * this.page, size * (this.page + 1)).map((id) => this.row(app, id))),
      el("div", { class: "controls" }, order.length > this.SHOWN && toggle,
        all && pages > 1 && [button(-1, "next.earlier"), button(1, "next.later"), app.t("next.page", { page: this.page + 1, pages })]));
    if (focused) toggle.focus();
  },

  row(app, id) {
    const { logits, tempered, cut, probabilities, options } = this.found;
    const rule = cut[id] ? app.t("next.cut", { rule: cut[id] })
      : probabilities[id] > 0 ? app.t("next.kept") : options.temperature === 0 ? app.t("next.greedy") : app.t("next.tiny");
    return [
      Dom.el("span", { class: cut[id] ? "mono cut" : "mono" }, app.tokenizer.show(id)), id, Dom.number(logits[id], 3),
      Dom.percent(tempered[id], 2), Dom.el("span", { class: cut[id] ? "rule" : null }, rule),
      [Dom.percent(probabilities[id], 2), " ", Dom.bar(probabilities[id])],
    ];
  },

  csv(app) {
    const { order, logits, tempered, cut, probabilities } = this.found;
    const rows = order.map((id) => [app.tokenizer.show(id), id, logits[id], tempered[id], cut[id] ?? "kept", probabilities[id]]);
    return Dom.csv([["token", "id", "logit", "after temperature", "rule", "probability"], ...rows]);
  },
};
