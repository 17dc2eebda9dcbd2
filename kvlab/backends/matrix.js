(function (root) {
  var d = JSON.parse(root.querySelector('.kvlab-matrix-data').textContent);
  var form = root.querySelector('form'), body = root.querySelector('tbody');
  var count = root.querySelector('.kvlab-matrix-count'), limit = 400;
  var pick = function (n) { return form.elements[n].value; };
  var cell = function (row, text) { var e = row.insertCell(); e.textContent = text; return e; };
  var marks = {d: 'default', c: 'casts the pool', q: 'rounds Q to FP8'};
  form.hidden = false;
  ['models', 'gpus', 'releases'].forEach(function (n, i) { form.elements[n].value = d.start[i]; });
  function show() {
    var m = d.models.indexOf(pick('models')), g = d.gpus.indexOf(pick('gpus'));
    var r = d.releases.indexOf(pick('releases')), b = d.backends.indexOf(pick('backends')), a = pick('answers');
    var rows = d.cells.filter(function (c) {
      return (m < 0 || c[0] === m) && (g < 0 || c[1] === g) && (r < 0 || c[2] === r) && (b < 0 || c[3] === b) &&
        (!a || (a === 'works, no cast' ? c[4] === 'works' && c[5].indexOf('c') < 0 : c[4] === a));
    });
    body.textContent = '';
    rows.slice(0, limit).forEach(function (c) {
      var row = body.insertRow();
      cell(row, d.models[c[0]]); cell(row, d.gpus[c[1]]); cell(row, d.releases[c[2]]); cell(row, d.backends[c[3]]);
      cell(row, [c[4]].concat(c[5].split('').filter(Boolean).map(function (k) { return marks[k]; })).join(', '));
      var why = cell(row, ''), det = document.createElement('details'), sum = document.createElement('summary');
      sum.textContent = d.reasons[c[6]]; det.appendChild(sum);
      var ul = document.createElement('ul'); det.appendChild(ul);
      c[7].forEach(function (i) { var li = document.createElement('li'); li.textContent = d.evidence[i]; ul.appendChild(li); });
      why.appendChild(c[7].length ? det : document.createTextNode(d.reasons[c[6]]));
    });
    count.textContent = rows.length + ' answers' + (rows.length > limit ? ', the first ' + limit + ' shown' : '');
  }
  form.addEventListener('change', show);
  form.addEventListener('submit', function (e) { e.preventDefault(); });
  show();
})(document.currentScript.parentElement);
