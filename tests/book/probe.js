// What the tests ask a page, in the page.
window.probe = {
  // For each figure and visible trace: finite points in its data, and marks that stand in the SVG.
  figures() {
    const ok = (v) => v !== null && v !== undefined && v !== "" && !Number.isNaN(v);
    const pairs = (a, b) => {
      let n = 0;
      for (let i = 0; i < Math.min(a.length, b.length); i++) n += ok(a[i]) && ok(b[i]) ? 1 : 0;
      return n;
    };
    return [...document.querySelectorAll(".js-plotly-plot")].map((gd) =>
      gd._fullData
        .filter((t) => t.visible === true)
        .map((t) => {
          const out = { type: t.type, mode: t.mode || "", name: t.name, data: 0, drawn: 0 };
          if (t.type === "bar" || t.type.startsWith("scatter")) out.data = pairs(t.x, t.y);
          else if (t.type === "pie") out.data = t.values.length;
          else if (t.type === "waterfall") {
            out.data = pairs(t.x, t.y);
            out.drawn = gd.querySelectorAll(".waterfalllayer .point path[d]").length === out.data ? out.data : 0;
            return out;
          }
          else if (t.type === "icicle") {
            // Slices narrower than a pixel are not drawn.
            out.data = t.labels.length;
            out.drawn = gd.querySelectorAll(".iciclelayer g.slice").length > 1 ? out.data : 0;
            return out;
          }
          else if (t.type === "heatmap") out.data = [...t.z].reduce((n, row) => n + row.length, 0);
          const groups = [...gd.querySelectorAll("g.trace, g.hm")];
          const bound = (g) => g.__data__ && g.__data__[0] && g.__data__[0].trace;
          const group = groups.find((g) => bound(g) && bound(g).uid === t.uid)
            || groups.find((g) => [...g.classList].some((c) => c.endsWith(t.uid)));
          if (!group) return out;
          const count = (selector) => group.querySelectorAll(selector).length;
          if (t.type === "bar") out.drawn = count(".point path[d]");
          else if (t.type === "pie") out.drawn = count(".slice");
          else if (t.type === "heatmap") out.drawn = count("image, path") ? out.data : 0;
          else if (out.mode.includes("markers")) out.drawn = count(".points path.point");
          else if (out.mode.includes("lines")) {
            const d = [...group.querySelectorAll("path.js-line")].map((p) => p.getAttribute("d") || "").join(" ");
            out.drawn = (d.match(/[MLHVCQ]/g) || []).length;
          } else if (out.mode.includes("text")) out.drawn = count("text");
          return out;
        }));
  },

  // Formulas that MathJax left alone or could not read.
  rawMath() {
    const bare = [...document.querySelectorAll(".math")].filter((m) => !m.querySelector("mjx-container"));
    return [...bare, ...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map((m) => m.textContent);
  },

  // Text that reaches out of its figure, and a page that must be scrolled sideways.
  overflow() {
    const out = [];
    const width = document.documentElement.scrollWidth;
    if (width > window.innerWidth) out.push(`page: ${width}`);
    for (const gd of document.querySelectorAll(".js-plotly-plot")) {
      const box = gd.getBoundingClientRect();
      if (box.width === 0) continue;
      for (const t of gd.querySelectorAll("svg text")) {
        const r = t.getBoundingClientRect();
        const out_of = r.left < box.left - 2 || r.right > box.right + 2 || r.top < box.top - 2 || r.bottom > box.bottom + 2;
        if (r.width && out_of) out.push(t.textContent);
      }
    }
    return out;
  },

  // Plain words and figures in tables that are broken over two lines; long names may be.
  brokenWords() {
    const out = [];
    for (const td of document.querySelectorAll(".kv-table td.kv-text")) {
      if (!td.offsetParent) continue;
      const walker = document.createTreeWalker(td, NodeFilter.SHOW_TEXT);
      for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        for (const word of node.data.matchAll(/[^\s\u00a0]+/g)) {
          if (!/^[(]?[\p{L}\d.×%]{2,9}[),;]?$/u.test(word[0])) continue;
          const range = document.createRange();
          range.setStart(node, word.index);
          range.setEnd(node, word.index + word[0].length);
          const lines = new Set([...range.getClientRects()].filter((r) => r.width).map((r) => Math.round(r.top)));
          if (lines.size > 1) out.push(`${word[0]} in ${td.textContent.trim().slice(0, 60)}`);
        }
      }
    }
    return out;
  },

  // Titles, legends and axes of figures that lie on each other.
  collisions() {
    const out = [];
    for (const gd of document.querySelectorAll(".js-plotly-plot")) {
      const parts = [...gd.querySelectorAll(".gtitle, .legend, .xtitle, .ytitle")]
        .map((e) => ({ name: e.getAttribute("class"), text: e.textContent, r: e.getBoundingClientRect() }))
        .filter((p) => p.r.width && p.r.height);
      const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
      parts.forEach((p, i) => parts.slice(i + 1).forEach((q) => {
        if (meet(p.r, q.r)) out.push(`${p.text} on ${q.text}`);
      }));
    }
    return out;
  },

  // Figure text with less than 4.5:1 against what it stands on.
  lowContrast() {
    const rgb = (c) => (c.match(/[\d.]+/g) || []).map(Number);
    const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const ground = (el) => {
      for (; el; el = el.parentElement) {
        const c = rgb(getComputedStyle(el).backgroundColor);
        if (c.length === 3 || c[3] > 0) return c;
      }
      return [255, 255, 255];
    };
    const out = [];
    for (const gd of document.querySelectorAll(".js-plotly-plot")) {
      const back = light(ground(gd));
      for (const t of gd.querySelectorAll(".xtick text, .ytick text, .legendtext, .gtitle, .xtitle, .ytitle, .annotation-text")) {
        const ink = light(rgb(getComputedStyle(t).fill));
        const ratio = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
        if (ratio < 4.5) out.push(`${t.textContent} ${ratio.toFixed(2)}`);
      }
    }
    return out;
  },

  // Outputs that the theme paints light.
  lightOutputs() {
    return [...document.querySelectorAll(".cell_output .output, .cell_output .text_html")].filter((o) => {
      const c = (getComputedStyle(o).backgroundColor.match(/[\d.]+/g) || []).map(Number);
      return (c.length === 3 || c[3] > 0) && Math.min(c[0], c[1], c[2]) > 150;
    }).length;
  },
};
