// Figures follow the page: its theme (light, dark, auto) and its width.
(() => {
  const NARROW = 560;
  const colours = () => {
    const css = getComputedStyle(document.documentElement);
    const ink = css.getPropertyValue("--pst-color-text-base").trim() || "#222";
    return { ink, ground: css.getPropertyValue("--pst-color-surface").trim() || "#fff" };
  };

  const layoutFor = (gd) => {
    const { ink, ground } = colours();
    const update = {
      "font.color": ink,
      "title.font.color": ink,
      "legend.font.color": ink,
      "hoverlabel.bgcolor": ground,
      "hoverlabel.font.color": ink,
      "font.size": gd.clientWidth < NARROW ? 11 : 13,
    };
    (gd.layout.annotations || []).forEach((_, i) => {
      update[`annotations[${i}].font.color`] = ink;
    });
    return update;
  };

  const paint = () =>
    document.querySelectorAll(".js-plotly-plot").forEach((gd) => {
      if (gd.layout) window.Plotly.relayout(gd, layoutFor(gd));
    });

  document.addEventListener("DOMContentLoaded", () => {
    if (!window.Plotly) return;
    paint();
    new MutationObserver(paint).observe(document.documentElement, {
      attributes: true,
      attributeFilter: ["data-theme"],
    });
    // A figure inside a closed fold has no width: draw it when the fold opens.
    document.querySelectorAll("details").forEach((d) =>
      d.addEventListener("toggle", () =>
        d.querySelectorAll(".js-plotly-plot").forEach((gd) => window.Plotly.Plots.resize(gd))));
  });
})();
