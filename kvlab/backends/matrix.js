(function (root) {
  var d = JSON.parse(root.querySelector('.kvlab-matrix-data').textContent);
  var form = root.querySelector('form'), table = root.querySelector('table'), body = root.querySelector('tbody');
  var count = root.querySelector('.kvlab-matrix-count'), advice = root.querySelector('.kvlab-advice'), limit = 400;
  var pick = function (n) { return form.elements[n].value; };
  var add = function (to, tag, text) { var e = document.createElement(tag); e.textContent = text; to.appendChild(e); return e; };
  var marks = {d: 'default', c: 'casts the pool', q: 'rounds Q to FP8'};
  form.hidden = false;
  ['models', 'gpus', 'releases'].forEach(function (n, i) { form.elements[n].value = d.start[i]; });

  function wanted(c, at, answer) {
    return at.every(function (i, k) { return i < 0 || c[k] === i; }) &&
      (!answer || (answer === 'works, no cast' ? c[4] === 'works' && c[5].indexOf('c') < 0 : c[4] === answer));
  }

  function draw(c) {
    var row = body.insertRow();
    [d.models[c[0]], d.gpus[c[1]], d.releases[c[2]], d.backends[c[3]]].forEach(function (t) { add(row, 'td', t); });
    add(row, 'td', [d.signs[c[4]]].concat(c[5].split('').filter(Boolean).map(function (k) { return marks[k]; })).join(', '));
    var why = add(row, 'td', '');
    if (!c[7].length) { why.textContent = d.reasons[c[6]]; return; }
    var details = add(why, 'details', '');
    add(details, 'summary', d.reasons[c[6]]);
    var list = add(details, 'ul', '');
    c[7].forEach(function (i) { add(list, 'li', d.evidence[i]); });
  }

  function advise(m, g, r) {
    advice.hidden = m < 0 || g < 0 || r < 0;
    if (advice.hidden) return;
    advice.querySelector('.kvlab-advice-of').textContent = [d.models[m], d.gpus[g], 'SGLang ' + d.releases[r]].join(', ');
    var list = advice.querySelector('dl');
    list.textContent = '';
    d.advice[(m * d.gpus.length + g) * d.releases.length + r].forEach(function (i) {
      var o = d.options[i];
      add(list, 'dt', o[0]);
      add(add(list, 'dd', ''), 'code', o[1]);
      [1, 2, 3].forEach(function (k) { if (o[k + 1]) add(list, 'dd', o[k + 1]).className = 'kvlab-said'; });
    });
    if (!list.firstChild) add(list, 'dt', 'nothing: no check of this release leaves a way');
  }

  function show() {
    var at = ['models', 'gpus', 'releases', 'backends'].map(function (n) { return d[n].indexOf(pick(n)); });
    var rows = d.cells.filter(function (c) { return wanted(c, at, pick('answers')); });
    body.textContent = '';
    rows.slice(0, limit).forEach(draw);
    table.className = [1, 2, 3].filter(function (k) { return at[k - 1] >= 0; }).map(function (k) { return 'kvlab-set-' + k; }).join(' ');
    count.textContent = rows.length.toLocaleString('en') + ' answers' + (rows.length > limit ? ', the first ' + limit + ' shown' : '');
    advise(at[0], at[1], at[2]);
  }
  form.addEventListener('change', show);
  form.addEventListener('submit', function (e) { e.preventDefault(); });
  show();
})(document.currentScript.parentElement);
