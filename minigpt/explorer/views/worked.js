/** Examples small enough to compute by hand: every number can be changed, and all later ones follow. Needs no model. */
const workedView = {
  name: "worked",
  tab: "worked",
  MOST: 8,
  STAGES: ["raw", "scaled", "masked", "weights", "output"],
  PUBLISHED: { raw: "raw_scores", scaled: "scaled_scores", weights: "weights", output: "output" },
  AGREES: 1e-9,

  create(root, app) {
    const { el } = Dom, examples = app.payload.examples;
    const group = (kind, list) => el("optgroup", { label: app.t(`worked.${kind}`) },
      list.map(({ name }) => el("option", { value: name }, name.replaceAll("_", " "))));
    this.shape = "";
    this.choice = el("select", { onchange: (event) => app.set({ example: event.target.value, problem: "", part: 0, wrong: "" }) },
      group("attention", examples.attention), group("multi_head", examples.multi_head), group("parts", examples.parts.filter(Parts.steps)));
    this.about = el("p", {});
    this.body = el("div");
    Dom.show(root, el("h2", {}, app.t("worked.title")), el("p", {}, app.t("worked.about")),
      el("div", { class: "controls" }, el("label", {}, app.t("worked.example"), this.choice)), this.about, this.body);
  },

  update(app, changed) {
    if (!["tab", "example", "problem", "part", "wrong", "cell"].some((name) => changed.has(name))) return;
    const { attention, multi_head: multiHead, parts } = app.payload.examples, all = [...attention, ...multiHead, ...parts];
    const example = all.find(({ name }) => name === app.state.example) ?? attention[0];
    this.choice.value = example.name;
    this.about.textContent = this.told(app, `about.${example.name}`, example.about);
    if (attention.includes(example)) return this.showAttention(app, example);
    this.shape = "";
    Dom.show(this.body, this.whole(app, example));
  },

  /** A sentence of the table, or what stands for it there. */
  told(app, key, otherwise) {
    const said = app.t(key);
    return said === key ? otherwise : said;
  },

  // ── one head ─────────────────────────────────────────────────────────────────────────────────────────────

  /** The example's problem of one head with its published numbers, and as it was edited. */
  read(app, example) {
    const heads = Attention.heads(example), part = Math.max(0, Math.min(heads.length - 1, app.state.part || 0));
    const published = Object.fromEntries(Object.entries(this.PUBLISHED).map(([stage, key]) =>
      [stage, Array.isArray(example[key][0][0]) ? example[key][part] : example[key]]));
    return { heads: heads.length, part, published, original: heads[part], problem: this.edited(app) ?? heads[part] };
  },

  /** The edited problem of the state; null if there is none, or what the address holds is no problem. */
  edited(app) {
    if (!app.state.problem) return null;
    try {
      const [query, key, value, mask, scaled] = JSON.parse(app.state.problem), most = this.MOST;
      const is = (rows, width) => rows.length >= 1 && rows.length <= most && width >= 1 && width <= most
        && rows.every((row) => row.length === width && row.every(Number.isFinite));
      const good = is(query, query[0].length) && is(key, query[0].length) && is(value, value[0].length)
        && value.length === key.length && (mask === null || (is(mask, key.length) && mask.length === query.length));
      return good ? { query, key, value, mask, scaled: Boolean(scaled) } : null;
    } catch {
      return null;
    }
  },

  edit(app, problem) {
    const { query, key, value, mask, scaled } = problem;
    app.set({ problem: JSON.stringify([query, key, value, mask, scaled]) });
  },

  showAttention(app, example) {
    const read = this.read(app, example), { problem } = read;
    const { query, key, value } = problem;
    this.problem = problem;
    const shape = [app.state.lang, example.name, read.part, query.length, key.length, query[0].length, value[0].length].join();
    if (shape !== this.shape) this.layOut(app, read);
    this.shape = shape;
    this.fillIn(problem);
    const cell = String(app.state.cell ?? "0.0").split(".").map(Number);
    this.row = Math.max(0, Math.min(query.length - 1, cell[0] || 0));
    this.column = Math.max(0, Math.min(key.length - 1, cell[1] || 0));
    const steps = Attention.steps(problem);
    this.agreed.textContent = this.agreement(app, read, steps);
    Dom.show(this.later, this.STAGES.map((stage) => this.stage(app, stage, problem, steps)));
    this.showWrong(app, problem, steps);
  },

  /** Inputs and buttons; made anew only when the shape changes, so that the focus stays where one types. */
  layOut(app, read) {
    const { el } = Dom, focus = document.activeElement?.dataset?.size;
    const size = (name, n, change) => el("span", { class: "controls" }, app.t(`worked.${name}`),
      [["−", -1], ["+", 1]].map(([sign, by]) => el("button", {
        type: "button", "data-size": name + sign, "aria-label": `${app.t(`worked.${name}`)} ${sign}`, disabled: n + by < 1 || n + by > this.MOST,
        onclick: () => this.edit(app, change(this.problem, by)),
      }, sign)), n);
    const { query, key, value } = read.problem;
    this.inputs = ["query", "key", "value"].map((part) => this.grid(app, part, read.problem[part]));
    this.mask = this.maskGrid(app, read.problem);
    this.scaled = el("input", { type: "checkbox", onchange: (event) => this.edit(app, { ...this.problem, scaled: event.target.checked }) });
    this.agreed = el("p", { class: "said", role: "status" });
    this.later = el("div", { class: "columns" });
    this.wrong = el("div");
    const masks = { all: () => 1, causal: (t, s) => +(s <= t), window: (t, s) => +(s <= t && s > t - 2) };
    Dom.show(this.body,
      read.heads > 1 && el("div", { class: "controls" }, Array.from({ length: read.heads }, (_, h) =>
        el("button", { type: "button", "aria-pressed": String(h === read.part), onclick: () => app.set({ part: h, problem: "" }) }, `${app.t("head")} ${h}`))),
      el("div", { class: "controls" },
        size("queries", query.length, (p, by) => ({ ...p, query: resized(p.query, by), mask: p.mask && resized(p.mask, by, 1) })),
        size("keys", key.length, (p, by) => ({
          ...p, key: resized(p.key, by), value: resized(p.value, by), mask: p.mask?.map((row) => longer(row, by, 1)) ?? null,
        })),
        size("keySize", query[0].length, (p, by) => ({ ...p, query: p.query.map((row) => longer(row, by)), key: p.key.map((row) => longer(row, by)) })),
        size("valueSize", value[0].length, (p, by) => ({ ...p, value: p.value.map((row) => longer(row, by)) }))),
      el("div", { class: "columns" }, this.inputs.map(({ node }) => node), this.mask.node),
      el("div", { class: "controls" },
        Object.entries(masks).map(([name, sees]) => el("button", {
          type: "button", onclick: () => this.edit(app, { ...this.problem, mask: this.problem.query.map((_, t) => this.problem.key.map((_, s) => sees(t, s))) }),
        }, app.t(`worked.mask.${name}`))),
        el("label", {}, this.scaled, app.t("worked.scaled")),
        el("button", { type: "button", onclick: () => app.set({ problem: "" }) }, app.t("worked.reset"))),
      this.agreed, el("p", { class: "quiet" }, app.t("worked.choose")), this.later,
      el("h3", {}, app.t("worked.whatIf")), el("p", {}, app.t("worked.whatIfAbout")), this.wrong);
    if (focus) this.body.querySelector(`[data-size="${focus}"]:not(:disabled), [data-size^="${focus.slice(0, -1)}"]:not(:disabled)`)?.focus();

    function longer(row, by, fill = 0) {
      return by > 0 ? [...row, fill] : row.slice(0, -1);
    }

    function resized(rows, by, fill = 0) {
      return by > 0 ? [...rows, rows[0].map(() => fill)] : rows.slice(0, -1);
    }
  },

  /** A matrix of number fields. */
  grid(app, part, rows) {
    const letter = part[0].toUpperCase(), fields = rows.map((row, i) => row.map((_, j) => Dom.el("input", {
      type: "number", step: "any", "aria-label": `${letter} ${i + 1}, ${j + 1}`, class: "cell",
      oninput: (event) => {
        const x = event.target.valueAsNumber;
        event.target.setAttribute("aria-invalid", String(!Number.isFinite(x)));
        if (!Number.isFinite(x)) return;
        const changed = this.problem[part].map((numbers) => [...numbers]);
        changed[i][j] = x;
        this.edit(app, { ...this.problem, [part]: changed });
      },
    })));
    return { part, fields, node: Dom.table(["", ...rows[0].map((_, j) => j + 1)], fields.map((row, i) => [`${letter.toLowerCase()}${i + 1}`, ...row]), `${letter} (${app.t(`worked.rows.${part}`)})`) };
  },

  maskGrid(app, problem) {
    const buttons = problem.query.map((_, t) => problem.key.map((_, s) => Dom.el("button", {
      type: "button", "aria-label": app.t("worked.sees", { row: t + 1, key: s + 1 }),
      onclick: () => {
        const mask = this.problem.query.map((_, i) => this.problem.key.map((_, j) => (this.problem.mask ? this.problem.mask[i][j] : 1)));
        mask[t][s] = mask[t][s] ? 0 : 1;
        this.edit(app, { ...this.problem, mask });
      },
    })));
    return { buttons, node: Dom.table(["", ...problem.key.map((_, s) => `k${s + 1}`)], buttons.map((row, t) => [`q${t + 1}`, ...row]), app.t("worked.mask")) };
  },

  fillIn({ query, key, value, mask, scaled }) {
    const parts = { query, key, value };
    for (const { part, fields } of this.inputs) {
      fields.forEach((row, i) => row.forEach((field, j) => {
        if (field === document.activeElement && field.valueAsNumber === parts[part][i][j]) return;
        if (field.valueAsNumber !== parts[part][i][j]) field.value = parts[part][i][j];
        field.removeAttribute("aria-invalid");
      }));
    }
    this.mask.buttons.forEach((row, t) => row.forEach((button, s) => {
      const sees = !mask || Boolean(mask[t][s]);
      button.setAttribute("aria-pressed", String(sees));
      button.textContent = sees ? "1" : "0";
    }));
    this.scaled.checked = scaled;
  },

  agreement(app, { published, original, problem }, steps) {
    const same = JSON.stringify([problem.query, problem.key, problem.value, problem.scaled]) === JSON.stringify([original.query, original.key, original.value, original.scaled]);
    const seen = ({ query, key, mask }) => JSON.stringify(mask ?? query.map(() => key.map(() => 1)));
    if (!same || seen(problem) !== seen(original)) return app.t("worked.edited");
    return this.agrees(app, Object.entries(published).map(([stage, rows]) => [steps[stage], rows]));
  },

  /** How near what was computed is to what is published: [computed, published] pairs of any depth. */
  agrees(app, pairs) {
    const largest = pairs.reduce((most, [got, published]) => {
      const apart = Parts.apart(got, published);
      return apart <= most ? most : apart; // also NaN
    }, 0);
    return app.t(largest <= this.AGREES ? "worked.agrees" : "worked.disagrees", { difference: Dom.number(largest) });
  },

  // ── the steps ────────────────────────────────────────────────────────────────────────────────────────────

  /** One step: its formula, the chosen cell in numbers, and the table, whose rows and cells can be chosen. */
  stage(app, stage, problem, steps) {
    const { el } = Dom, label = app.t(`worked.stage.${stage}`);
    return el("div", {}, el("h3", {}, label), el("p", { class: "formula" }, app.t(`worked.formula.${stage}`)),
      el("p", { class: "mono" }, this.inNumbers(stage, problem, steps)),
      this.matrix(app, stage, steps[stage], { chosen: true, caption: "" }));
  },

  matrix(app, stage, rows, { chosen = false, caption = "", differs = () => false }) {
    const { el } = Dom, letter = stage === "output" ? "" : "k";
    const node = Dom.table(["", ...rows[0].map((_, j) => `${letter}${j + 1}`)], rows.map((row, i) => [
      chosen ? el("button", { type: "button", "aria-pressed": String(i === this.row), "data-cell": `${stage}${i}`, "aria-label": app.t("worked.row", { row: i + 1 }), onclick: () => this.choose(app, stage, i, this.column) }, `q${i + 1}`) : `q${i + 1}`,
      ...row.map((x, j) => el("span", {
        title: String(x), class: differs(i, j) ? "differs" : chosen && i === this.row && j === this.column && stage !== "output" ? "chosen" : null,
        onclick: chosen && stage !== "output" ? () => this.choose(app, stage, i, j) : null,
      }, Dom.number(x))),
    ]), caption);
    if (chosen) node.querySelectorAll("tbody tr")[this.row]?.setAttribute("aria-selected", "true");
    return node;
  },

  choose(app, stage, row, column) {
    app.set({ cell: `${row}.${column}` });
    this.later.querySelector(`[data-cell="${stage}${row}"]`)?.focus();
  },

  /** The formula with the numbers of the chosen cell. */
  inNumbers(stage, { query, key, value, mask, scaled }, steps) {
    const { number } = Dom, [t, s] = [this.row, this.column], [q, k] = [query[t], key[s]];
    const x = (one) => (one < 0 ? `(${number(one, 3)})` : number(one, 3));
    const sum = (a, b) => a.map((one, i) => `${x(one)}·${x(b[i])}`).join(" + ");
    if (stage === "raw") return `q${t + 1} · k${s + 1} = ${sum(q, k)} = ${number(steps.raw[t][s])}`;
    if (stage === "scaled") return scaled ? `${number(steps.raw[t][s])} ÷ √${q.length} = ${number(steps.scaled[t][s])}` : `${number(steps.raw[t][s])}`;
    if (stage === "masked") return `M[${t + 1}, ${s + 1}] = ${mask ? mask[t][s] : 1}: ${number(steps.masked[t][s])}`;
    if (stage === "output") return `o${t + 1}[1] = ${sum(steps.weights[t], value.map((row) => row[0]))} = ${number(steps.output[t][0])}`;
    const largest = Math.max(...steps.masked[t]);
    if (largest === -Infinity) return `w = 0`;
    const total = steps.masked[t].reduce((all, one) => all + Math.exp(one - largest), 0);
    return `e^(${number(steps.masked[t][s])} − ${x(largest)}) ÷ ${number(total)} = ${number(steps.weights[t][s])}`;
  },

  // ── what if ──────────────────────────────────────────────────────────────────────────────────────────────

  showWrong(app, problem, right) {
    const { el } = Dom, { state } = app, focus = document.activeElement?.dataset?.wrong;
    const name = (mistake) => this.told(app, `wrong.${mistake.name}`, mistake.name);
    const chosen = Attention.mistakes.find((mistake) => mistake.name === state.wrong);
    const wrong = chosen?.apply(problem);
    Dom.show(this.wrong,
      el("div", { class: "controls" }, Attention.mistakes.map((mistake) => el("button", {
        type: "button", "aria-pressed": String(mistake === chosen), "data-wrong": mistake.name,
        onclick: () => app.set({ wrong: mistake === chosen ? "" : mistake.name }),
      }, name(mistake)))),
      chosen && !wrong && el("p", { class: "said" }, app.t("worked.noShape")),
      wrong && this.besides(app, right, wrong, name(chosen)));
    if (focus) [...this.wrong.querySelectorAll("[data-wrong]")].find((button) => button.dataset.wrong === focus)?.focus();
  },

  /** Right and wrong side by side, from the first step that differs. */
  besides(app, right, wrong, name) {
    const { el } = Dom;
    const differs = (a, b) => !(Object.is(a, b) || Math.abs(a - b) <= this.AGREES);
    const cells = (stage) => right[stage].flatMap((row, i) => row.map((x, j) => differs(x, wrong[stage][i]?.[j])));
    const stages = this.STAGES.filter((stage) => cells(stage).some(Boolean) || right[stage][0].length !== wrong[stage][0].length);
    if (!stages.length) return el("p", { class: "said" }, app.t("worked.noDifference"));
    const counts = stages.map((stage) => `${app.t(`worked.stage.${stage}`)} ${cells(stage).filter(Boolean).length}/${cells(stage).length}`).join(", ");
    return [
      el("p", { class: "said" }, app.t("worked.differ", { counts })),
      stages.map((stage) => [
        el("h3", {}, app.t(`worked.stage.${stage}`)),
        el("div", { class: "columns" },
          this.matrix(app, stage, right[stage], { caption: app.t("worked.right") }),
          this.matrix(app, stage, wrong[stage], { caption: name, differs: (i, j) => differs(right[stage][i]?.[j], wrong[stage][i][j]) })),
      ]),
    ];
  },

  // ── several heads, and the other parts ───────────────────────────────────────────────────────────────────

  /** What is given, and step by step what follows from it. */
  whole(app, example) {
    const { el } = Dom, steps = Parts.steps(example), computed = new Set(steps.map(({ name }) => name));
    const given = Object.keys(example).filter((name) => !["name", "about"].includes(name) && !computed.has(name));
    const show = (name, formula, rows) => el("div", {}, el("h3", {}, name.replaceAll("_", " ")),
      formula && el("p", { class: "formula" }, formula), this.arrays(app, name, rows));
    return [
      el("p", { class: "said" }, this.agrees(app, steps.map(({ got, published }) => [got, published]))),
      el("h3", {}, app.t("worked.given")),
      el("div", { class: "columns" }, given.map((name) => show(name, "", example[name]))),
      el("h3", {}, app.t("worked.follows")),
      el("div", { class: "columns" }, steps.map(({ name, formula, got }) => show(name, formula, got))),
    ];
  },

  /** Tables of a number, a row, a matrix, or a matrix for each head. */
  arrays(app, name, rows) {
    if (Array.isArray(rows?.[0]?.[0])) return rows.map((one, h) => this.matrixOf(one, `${app.t("head")} ${h}`));
    return this.matrixOf(Array.isArray(rows?.[0]) ? rows : [[rows].flat()], "");
  },

  matrixOf(rows, caption) {
    const places = rows.flat().every(Number.isInteger) ? 0 : 4;
    const cell = (x) => Dom.el("span", { title: String(x) }, Dom.number(x, places));
    return Dom.table(["", ...rows[0].map((_, j) => j + 1)], rows.map((row, i) => [i + 1, ...row.map(cell)]), caption);
  },
};
