/** The few things that every view draws with: elements, tables, bars, maps, copies. Text enters as text only. */
const Dom = {
  /** An element; `on…` attributes are listeners, false and null attributes are left out, children are nodes or text. */
  el(tag, attributes = {}, ...children) {
    return Dom.fill(document.createElement(tag), attributes, children);
  },

  svg(tag, attributes = {}, ...children) {
    return Dom.fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  },

  fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(node.style, value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value != null) node.setAttribute(name, value);
    }
    node.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
    return node;
  },

  /** Put these children in place of what a node holds. */
  show(node, ...children) {
    node.replaceChildren(...children.flat(Infinity).filter((child) => child != null && child !== false));
    return node;
  },

  /** A table of text or nodes; the first row is the head. */
  table(head, rows, caption = "") {
    const cells = (tag, row) => row.map((cell) => Dom.el(tag, tag === "th" ? { scope: "col" } : {}, cell));
    return Dom.el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption || null },
      Dom.el("table", {},
        caption && Dom.el("caption", {}, caption),
        Dom.el("thead", {}, Dom.el("tr", {}, cells("th", head))),
        Dom.el("tbody", {}, rows.map((row) => Dom.el("tr", {}, cells("td", row))))));
  },

  /** "Shown as a table", closed until asked for; `make` is called when it is opened. */
  asTable(label, make) {
    const details = Dom.el("details", {}, Dom.el("summary", {}, label));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(make());
    });
    return details;
  },

  /** A number with so many places, in plain notation while it is readable. */
  number(x, places = 4) {
    if (!Number.isFinite(x)) return x === -Infinity ? "−∞" : x === Infinity ? "∞" : "–";
    const size = Math.abs(x);
    const text = size !== 0 && (size < 0.5 * 10 ** -places || size >= 1e6) ? x.toExponential(2) : x.toFixed(places);
    return text.replaceAll("-", "−");
  },

  percent(x, places = 1) {
    return Number.isFinite(x) ? `${Dom.number(100 * x, places)} %` : "–";
  },

  /** A bar of a share in [0, 1]. */
  bar(share, label = "") {
    const width = `${100 * Math.max(0, Math.min(1, share || 0))}%`;
    return Dom.el("span", { class: "bar", role: "img", "aria-label": label || Dom.percent(share) },
      Dom.el("i", { style: { left: "0", width } }));
  },

  /** A bar that goes left or right of its middle; `largest` fills half of it. */
  signedBar(x, largest) {
    const half = largest > 0 && Number.isFinite(x) ? Math.min(50, (50 * Math.abs(x)) / largest) : 0;
    return Dom.el("span", { class: "bar signed", role: "img", "aria-label": Dom.number(x) },
      Dom.el("i", { class: x < 0 ? "negative" : null, style: { left: `${x < 0 ? 50 - half : 50}%`, width: `${half}%` } }));
  },

  /** Colours of 0 … 1, one hue, by lightness alone: 256 × [red, green, blue], for the theme in use. */
  shades() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    if (Dom.shadesOf?.dark === dark) return Dom.shadesOf.colours;
    const [from, to] = dark ? [0.24, 0.95] : [0.985, 0.3];
    const colours = Array.from({ length: 256 }, (_, i) => {
      const share = i / 255;
      return Dom.oklch(from + (to - from) * share, 0.005 + 0.135 * Math.sin(Math.PI * 0.85 * share), 250);
    });
    Dom.shadesOf = { dark, colours };
    return colours;
  },

  /** OKLCH → sRGB in 0 … 255 (Ottosson 2020, "A perceptual color space for image processing"). */
  oklch(lightness, chroma, degrees) {
    const a = chroma * Math.cos((degrees * Math.PI) / 180), b = chroma * Math.sin((degrees * Math.PI) / 180);
    const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
    const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
    return [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ].map((x) => Math.round(255 * Math.max(0, Math.min(1, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055))));
  },

  /** Draw a causal map: `row(t)` gives t + 1 weights; what is masked stays clear, so that the hatching shows. */
  paintMap(canvas, length, row, { root = false, from = 0 } = {}) {
    canvas.width = canvas.height = Math.max(1, length);
    const picture = canvas.getContext("2d"), image = picture.createImageData(canvas.width, canvas.height);
    const colours = Dom.shades();
    for (let t = 0; t < length; t++) {
      const weights = row(t);
      for (let s = from; s <= t; s++) {
        const share = Math.max(0, Math.min(1, root ? Math.sqrt(weights[s]) : weights[s])) || 0;
        const place = 4 * (t * length + s), colour = colours[Math.round(255 * share)];
        for (let i = 0; i < 3; i++) image.data[place + i] = colour[i];
        image.data[place + 3] = 255;
      }
    }
    picture.putImageData(image, 0, 0);
  },

  /** The legend of a map. */
  scale(root, label) {
    const canvas = Dom.el("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const picture = canvas.getContext("2d"), image = picture.createImageData(256, 1), colours = Dom.shades();
    for (let i = 0; i < 256; i++) {
      image.data.set([...colours[Math.round(255 * (root ? Math.sqrt(i / 255) : i / 255))], 255], 4 * i);
    }
    picture.putImageData(image, 0, 0);
    return Dom.el("div", { class: "scale" }, "0", canvas, "1", Dom.el("span", {}, label));
  },

  /** Buttons that copy what the functions give: csv and svg text, png a canvas. */
  copyButtons(makers, said) {
    const copy = async (kind) => {
      try {
        if (kind === "png") {
          const blob = await new Promise((done) => makers.png().toBlob(done, "image/png"));
          await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
        } else await navigator.clipboard.writeText(makers[kind]());
        said(true);
      } catch {
        Dom.download(kind, makers[kind]);
        said(false);
      }
    };
    return Dom.el("span", { class: "copy" },
      Object.keys(makers).map((kind) => Dom.el("button", { type: "button", onclick: () => copy(kind) }, kind.toUpperCase())));
  },

  /** Where the clipboard may not be written, as in a page opened from disk, the same as a file. */
  async download(kind, make) {
    const types = { csv: "text/csv", svg: "image/svg+xml" };
    const blob = kind === "png"
      ? await new Promise((done) => make().toBlob(done, "image/png"))
      : new Blob([make()], { type: types[kind] });
    const address = URL.createObjectURL(blob);
    Dom.el("a", { href: address, download: `minigpt.${kind}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  },

  csv(rows) {
    const cell = (x) => (/[",\n\r]/.test(String(x)) ? `"${String(x).replaceAll('"', '""')}"` : String(x));
    return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
  },

  /** An SVG node as a file of its own. */
  svgText(node) {
    const copy = node.cloneNode(true);
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.prepend(Dom.svg("style", {}, "text{font:12px monospace;fill:#16181d}path{fill:none;stroke:#0b57a4}"));
    return new XMLSerializer().serializeToString(copy);
  },
};
