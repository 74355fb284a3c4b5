"""Style and script of a trace's page."""

STYLE = """
body { margin: 0; font: 13px/1.4 system-ui, sans-serif; color: #24292f; background: #fff }
header { display: flex; gap: 8px; align-items: center; padding: 10px 14px 4px; flex-wrap: wrap }
h1 { font-size: 15px; margin: 0 10px 0 0 }
input, button { font: inherit; padding: 2px 8px; border: 1px solid #c5cbd2; border-radius: 4px; background: #fff }
.hint { color: #6a737d }
#view { display: block; padding: 2px 14px 8px; white-space: pre-wrap; font-variant-numeric: tabular-nums }
main { display: flex; align-items: flex-start }
#canvas { flex: 1; min-width: 0; cursor: grab; touch-action: none }
#legend { width: 240px; max-height: 80vh; overflow-y: auto; padding: 0 12px; box-sizing: border-box }
#legend div { cursor: pointer; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; padding: 1px 3px }
#legend div.on { background: #e8eef6; font-weight: 600 }
#legend i { display: inline-block; width: 11px; height: 11px; margin-right: 7px; vertical-align: -1px }
#tip { position: fixed; background: #24292f; color: #fff; padding: 5px 9px; border-radius: 4px; white-space: pre;
  pointer-events: none; font-size: 12px; z-index: 2 }
"""

SCRIPT = r"""
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const [START, LENGTH, KIND, UNIT, BYTES, SENT, CALLS] = data.fields.keys();
const canvas = document.getElementById('canvas'), pen = canvas.getContext('2d');
const tip = document.getElementById('tip'), find = document.getElementById('find');
const LEFT = 118, TOP = 26, TALL = 30, LOW = 20, WAIT = '#d1382c', OTHER = '#b9c0c7', INK = '#24292f';
const all = data.ranks.flatMap(rank => rank.rows.flatMap(row => row.spans));
// Not Math.max(...): a call takes some 100,000 arguments, and a long trace has more spans.
const largest = (least, values) => values.reduce((most, value) => Math.max(most, value), least);
const end = largest(0, all.map(span => span[START] + span[LENGTH]));
let from = 0, to = end, followed = -1, dragged = null, boxes = [];

function time(us) { return us >= 1e6 ? (us / 1e6).toFixed(3) + ' s' : us >= 1e3 ? (us / 1e3).toFixed(3) + ' ms'
  : us.toFixed(1) + ' us'; }
function size(n) { for (const unit of ['B', 'KiB', 'MiB', 'GiB']) { if (n < 999.5 || unit === 'GiB')
  return (unit === 'B' || n >= 999.5 ? Math.round(n) : n.toPrecision(3)) + ' ' + unit; n /= 1024; } }
function named(unit) { const words = find.value.trim().toLowerCase();
  return (followed < 0 || data.units[unit][0].split(' + ').includes(data.units[followed][0]))
    && (!words || data.units[unit][0].toLowerCase().includes(words)); }
function color(span) {
  const kind = data.kinds[span[KIND]], hue = data.units[span[UNIT]][1];
  if (kind.startsWith('wait')) return WAIT;
  if (kind === 'optimizer') return INK;
  if (hue === null || !['forward', 'backward', 'all-gather', 'reduce-scatter', 'all-reduce'].includes(kind)) return OTHER;
  return `hsl(${hue} 65% ${kind === 'forward' ? 80 : 62}%)`;
}
function x(us) { return LEFT + (us - from) / (to - from) * (canvas.clientWidth - LEFT - 8); }
function nice(rough) { const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(n => n * power).find(n => n >= rough); }

function draw() {
  const rows = data.ranks.reduce((n, rank) => n + rank.rows.length, 0);
  let height = TOP + 8;
  for (const rank of data.ranks) height += 22 + rank.rows.reduce((sum, row) => sum + high(row) + 3, 0)
    + (rank.memory.length ? 52 : 0);
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + 'px';
  canvas.width = width * scale; canvas.height = height * scale;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = '11px system-ui, sans-serif'; pen.textBaseline = 'middle';
  const step = nice((to - from) / 8);
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    pen.fillStyle = '#e4e7eb'; pen.fillRect(x(at), TOP - 6, 1, height);
    const text = time(at).replace(/\.?0+ /, ' '), last = width - pen.measureText(text).width / 2;
    pen.fillStyle = '#6a737d'; pen.textAlign = 'center'; pen.fillText(text, Math.min(x(at), last), 10);
  }
  boxes = [];
  let y = TOP;
  for (const rank of data.ranks) {
    pen.textAlign = 'left'; pen.fillStyle = INK; pen.font = 'bold 11px system-ui, sans-serif';
    pen.fillText('rank ' + rank.rank, 8, y + 8);
    pen.font = '11px system-ui, sans-serif';
    for (const start of rank.starts) if (start >= from && start <= to) {
      pen.fillStyle = '#6a737d'; pen.fillRect(x(start), y, 1, 18); pen.fillText('forward', x(start) + 4, y + 8); }
    y += 20;
    for (const row of rank.rows) {
      pen.textAlign = 'right'; pen.fillStyle = INK; pen.fillText(row.name, LEFT - 8, y + high(row) / 2);
      for (const span of row.spans) if (span[START] < to && span[START] + span[LENGTH] > from) box(span, y, high(row));
      y += high(row) + 3;
    }
    if (rank.memory.length) { memory(rank.memory, y + 4, 40); y += 52; }
    y += 2;
  }
  tell();
}
function high(row) { return row.name.startsWith('compute') ? TALL : LOW; }
function box(span, y, height) {
  const left = Math.max(x(span[START]), LEFT), right = Math.min(x(span[START] + span[LENGTH]), canvas.clientWidth - 8);
  const width = Math.max(right - left, 0.6);
  pen.globalAlpha = named(span[UNIT]) ? 1 : 0.15;
  pen.fillStyle = color(span); pen.fillRect(left, y, width, height);
  const kind = data.kinds[span[KIND]], plain = [OTHER, INK].includes(color(span));
  const text = kind.startsWith('wait') ? 'wait' : plain ? kind : data.units[span[UNIT]][0];
  if (width > 24 && pen.measureText(text).width < width - 6) {
    pen.textAlign = 'left'; pen.fillStyle = [WAIT, INK].includes(color(span)) ? '#fff' : INK;
    pen.fillText(text, left + 3, y + height / 2);
  }
  pen.globalAlpha = 1;
  boxes.push([left, y, Math.max(width, 3), height, span]);
}
function memory(points, y, height) {
  const most = largest(1, points.map(point => point[1]));
  pen.textAlign = 'right'; pen.fillStyle = INK; pen.fillText('buffers', LEFT - 8, y + height / 2 - 6);
  pen.fillStyle = '#6a737d'; pen.fillText(size(most), LEFT - 8, y + height / 2 + 8);
  pen.save(); pen.beginPath(); pen.rect(LEFT, y, canvas.clientWidth - LEFT - 8, height); pen.clip();
  pen.beginPath(); pen.moveTo(x(0), y + height);
  let level = 0;
  for (const [at, bytes] of [...points, [end, 0]]) {
    pen.lineTo(x(at), y + height - level / most * height);
    level = bytes;
    pen.lineTo(x(at), y + height - level / most * height);
  }
  pen.lineTo(x(end), y + height); pen.fillStyle = '#cfd8e3'; pen.fill(); pen.restore();
}
function tell() {
  const lines = data.ranks.map(rank => {
    const sums = {};
    for (const row of rank.rows) if (row.name.startsWith('compute')) for (const span of row.spans) {
      const inside = Math.min(span[START] + span[LENGTH], to) - Math.max(span[START], from);
      if (inside > 0 && named(span[UNIT])) { const kind = data.kinds[span[KIND]]; sums[kind] = (sums[kind] || 0) + inside; }
    }
    const told = Object.entries(sums).sort((a, b) => b[1] - a[1]).map(([kind, us]) => kind + ' ' + time(us));
    const head = 'rank ' + rank.rank + ', ' + time(to - from) + ' in view: ';
    return head + (told.join(', ') || 'nothing on the compute track');
  });
  document.getElementById('view').textContent = lines.join('\n');
  history.replaceState(null, '', '#' + Math.round(from) + '-' + Math.round(to));
}
function zoom(factor, at) {
  const length = Math.min(Math.max((to - from) * factor, 1), end), share = (at - from) / (to - from);
  from = Math.min(Math.max(at - share * length, 0), end - length); to = from + length; draw();
}
function legend() {
  const list = document.getElementById('legend');
  for (const pair of [['wait', WAIT], ['copy, sum, launch, landing', OTHER], ['optimizer', INK]]) entry(...pair);
  data.units.forEach(([name, hue], at) => {
    if (hue !== null && !name.includes(' + ')) entry(name, `hsl(${hue} 65% 62%)`, at); });
  function entry(name, paint, unit) {
    const line = document.createElement('div'), mark = document.createElement('i');
    mark.style.background = paint; line.append(mark, name); line.title = name; list.append(line);
    if (unit !== undefined) { line.dataset.unit = unit; line.onclick = () => follow(unit); }
  }
}
function follow(unit) {
  followed = followed === unit ? -1 : unit;
  for (const line of document.querySelectorAll('#legend div')) line.classList.toggle('on', line.dataset.unit == followed
    && followed >= 0);
  draw();
}
function under(event) {
  const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
  return boxes.findLast(([left, y, width, height]) => px >= left && px <= left + width && py >= y && py <= y + height);
}
canvas.onwheel = event => { event.preventDefault(); const box = canvas.getBoundingClientRect();
  const at = from + (event.clientX - box.left - LEFT) / (canvas.clientWidth - LEFT - 8) * (to - from);
  zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(Math.max(at, from), to)); };
canvas.onpointerdown = event => { dragged = [event.clientX, from, false]; canvas.setPointerCapture(event.pointerId); };
canvas.onpointermove = event => {
  if (dragged) {
    const length = to - from, moved = (dragged[0] - event.clientX) / (canvas.clientWidth - LEFT - 8) * length;
    if (Math.abs(dragged[0] - event.clientX) > 3) dragged[2] = true;
    from = Math.min(Math.max(dragged[1] + moved, 0), end - length); to = from + length; draw(); return;
  }
  const hit = under(event); tip.hidden = !hit;
  if (hit) {
    const span = hit[4];
    tip.textContent = data.kinds[span[KIND]] + ' of ' + data.units[span[UNIT]][0] + '\n' + time(span[LENGTH]) + ' from '
      + time(span[START]) + (span[BYTES] ? '\n' + size(span[BYTES]) + ', ' + size(span[SENT]) + ' sent, ' + span[CALLS]
      + (span[CALLS] === 1 ? ' call' : ' calls') : '');
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = event.clientY + 14 + 'px';
  }
};
canvas.onpointerup = event => { const click = dragged && !dragged[2]; dragged = null;
  if (click) { const hit = under(event); if (hit) { const name = data.units[hit[4][UNIT]][0].split(' + ')[0];
    follow(data.units.findIndex(unit => unit[0] === name)); } } };
canvas.onpointerleave = () => { tip.hidden = true; };
document.getElementById('in').onclick = () => zoom(0.5, (from + to) / 2);
document.getElementById('out').onclick = () => zoom(2, (from + to) / 2);
document.getElementById('all').onclick = () => { from = 0; to = end; find.value = ''; followed = -1; follow(-1); };
find.oninput = draw;
document.onkeydown = event => { if (event.target === find) return;
  const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key], length = to - from;
  if (move) { from = Math.min(Math.max(from + move * length, 0), end - length); to = from + length; draw(); }
  if (event.key === '+' || event.key === '-') zoom(event.key === '+' ? 0.5 : 2, (from + to) / 2); };
window.onresize = draw;
const asked = /^#(\d+)-(\d+)$/.exec(location.hash);
if (asked && +asked[1] < +asked[2] && +asked[2] <= end * 1.01) { from = +asked[1]; to = Math.min(+asked[2], end); }
legend();
draw();
"""
