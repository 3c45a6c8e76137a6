/**
 * What all views share: the state, which the address keeps; the trace of the text; and who is told when it changes.
 * A view is `{name, tab, create(root, app), update(app, changed)}`; `changed` is a set of names of state, and "trace".
 */
class App {
  static KINDS = {
    layer: Number, head: Number, row: Number, key: Number, step: Number, model: Number,
    drawn: Number, held: Number, all: Number, part: Number, other: Number, frame: Number,
  };

  constructor(payload, engines, tokenizer, views) {
    Object.assign(this, { payload, engines, tokenizer, views });
    this.trace = null;
    this.mistake = "";
    this.turn = 0;
    this.state = {
      tab: payload.view && views.some((view) => view.tab === payload.view) ? payload.view : engines.length ? "look" : "worked",
      lang: payload.lang, text: payload.text, model: 0, layer: 0, head: 0, row: -1, key: -1, step: 1,
      ...this.fromAddress(),
    };
    this.clamp();
  }

  get engine() {
    return this.engines[Math.min(this.state.model, this.engines.length - 1)];
  }

  /** A sentence or word of the interface, with {names} filled in. */
  t(key, values = {}) {
    const { strings } = this.payload, text = strings[this.state.lang]?.[key] ?? strings.en[key] ?? key;
    return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
  }

  fromAddress() {
    const found = {};
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      const number = Number(value);
      if (!(name in App.KINDS)) found[name] = value;
      else if (Number.isInteger(number)) found[name] = number;
    }
    return found;
  }

  toAddress() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => {
      const shown = Object.entries(this.state).filter(([, value]) => value !== "" && value != null);
      try {
        history.replaceState(null, "", `#${new URLSearchParams(shown)}`);
      } catch {
        // a sandboxed frame has no history of its own
      }
    }, 150);
  }

  /** Change the state; the text and the checkpoint bring a new trace with them. */
  async set(changes) {
    const changed = new Set(Object.keys(changes).filter((name) => this.state[name] !== changes[name]));
    Object.assign(this.state, changes);
    if (!("key" in changes) && ["text", "model", "layer", "head", "row"].some((name) => changed.has(name))) this.state.key = -1;
    if (changed.has("text") || changed.has("model")) await this.retrace(changed);
    else if (changed.size) this.tell(changed);
    await this.drawing;
  }

  /** The trace of the state's text; a mistake in it is shown, and the last trace stays. */
  async retrace(changed = new Set()) {
    const turn = ++this.turn;
    if (!this.engine) return this.tell(changed);
    try {
      const ids = this.engine.canType ? this.tokenizer.encode(this.state.text) : this.engine.ids(this.state.text);
      const kept = ids.slice(0, this.engine.contextLength);
      this.mistake = ids.length > kept.length ? this.t("tooLong", { n: this.engine.contextLength, all: ids.length }) : "";
      const trace = kept.length ? await this.engine.trace(kept) : null;
      if (turn !== this.turn) return; // a later text is on its way
      if (!trace) this.mistake = this.t("empty");
      this.stale = !trace;
      const followed = this.trace ? this.state.row === this.trace.length - 1 : this.state.row < 0;
      if (trace) {
        this.trace = trace;
        if (followed || this.state.row >= trace.length) this.state.row = trace.length - 1;
      }
      changed.add("trace").add("row");
    } catch (error) {
      if (error.constructor !== Error) throw error; // a bug, and no sentence for the user
      if (turn !== this.turn) return;
      this.mistake = error.key ? this.t(error.key, error.values) : error.message;
      this.stale = true;
    }
    this.tell(changed.add("mistake"));
  }

  tell(changed) {
    this.clamp();
    this.toAddress();
    const shown = this.views.filter((view) => view.tab === this.state.tab && view.root);
    for (const view of shown) view.stale = new Set([...(view.stale ?? []), ...changed]);
    const inSight = shown.filter(({ root }) => {
      const { top, bottom } = root.getBoundingClientRect();
      return top < innerHeight && bottom > 0;
    });
    inSight.forEach((view) => this.draw(view));
    this.drawing ??= new Promise((done) => setTimeout(() => { // what is out of sight waits until the rest is on the screen
      this.drawing = null;
      this.views.forEach((view) => this.draw(view));
      done();
    }, 20));
    if (this.onchange) this.onchange(changed);
  }

  /** Bring a view up to date, if it is not. */
  draw(view) {
    const { stale } = view;
    view.stale = null;
    if (stale && view.root) view.update(this, stale);
  }

  /** Numbers that came from the address may be out of range. */
  clamp() {
    const { state, engine, trace, payload } = this;
    if (!Object.hasOwn(payload.strings, state.lang)) state.lang = payload.lang;
    if (!engine) return;
    const within = (x, n) => Math.max(0, Math.min(n - 1, x));
    state.model = within(state.model, this.engines.length);
    state.layer = within(state.layer, engine.sizes.n_layer);
    state.head = within(state.head, engine.sizes.n_head);
    if (trace) {
      state.row = within(state.row, trace.length);
      if (state.key < 0) state.key = this.strongest();
      state.key = within(state.key, trace.length);
    }
    state.step = Math.max(1, Math.min(6, state.step));
  }

  /** The key from which the chosen row moves most. */
  strongest() {
    const { layer, head, row } = this.state, weights = this.trace.weights(layer, head, row);
    return weights.indexOf(Math.max(...weights));
  }

  /** "5 ␣the", to name a place of the text. */
  place(t) {
    return `${t} ${this.tokenizer.show(this.trace.ids[t])}`;
  }
}
