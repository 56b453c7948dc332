"""Decides what the report shows in a browser: one page that loads nothing else."""

import dataclasses

import jinja2

from ..left_out import by_reason
from .coverage import Tally, summarize
from .text import notices, problems, summary
from .values import KernelState, Report, TakenKernel

# Of very many kernels the slowest are shown; the JSON report has them all.
_MOST_KERNELS = 500
_PARTS = ("hit", "built", "failed", "left")


@dataclasses.dataclass(frozen=True)
class _Build:
    """A row of the table of build times."""

    name: str
    what: str
    rows: int
    seconds: float
    share: float


def to_html(report: Report) -> str:
    """Return ``report`` as a page of its own: no script, nothing from elsewhere."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    builds = _builds(report)
    return environment.from_string(_PAGE).render(
        report=report,
        coverage=summarize(report),
        summary=summary(report),
        problems=[*problems(report), *notices(report)],
        builds=builds[:_MOST_KERNELS],
        more_builds=max(0, len(builds) - _MOST_KERNELS),
        parts=_PARTS,
        describe=_describe,
        knowingly=by_reason(),
    )


def _describe(tally: Tally) -> str:
    """Return what a bar shows, for those who do not see it."""
    parts = ", ".join(f"{getattr(tally, part)} {part}" for part in _PARTS)
    return f"{tally.planned} calls planned: {parts}"


def _builds(report: Report) -> list[_Build]:
    built: list[tuple[str, TakenKernel]] = [
        (f"{result.spec.entry_point} {result.spec.shape}", kernel)
        for result in report.results
        for kernel in result.kernels
        if kernel.state is KernelState.BUILT
    ]
    built.sort(key=lambda pair: -pair[1].seconds)
    longest = max((kernel.seconds for _, kernel in built), default=0.0)
    return [
        _Build(
            kernel.name or "",
            what,
            kernel.rows,
            kernel.seconds,
            100 * kernel.seconds / longest if longest else 0.0,
        )
        for what, kernel in built
    ]


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<title>DeepGEMM warmup</title>
<style>
:root { color-scheme: light dark; --line: #8886; --hit: #4c78a8; --built: #e0a030;
  --failed: #c8402f; --left: #8a8a8a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --hit: #7fb0e0; --built: #f0c060; --failed: #ff8272; --left: #a0a0a0;
    --bad: #ff8a80; } }
body { font: 1rem/1.45 system-ui, sans-serif; max-width: 70rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
h3 { font: 600 1rem ui-monospace, monospace; margin: 1.5rem 0 .3rem; }
.bar { display: flex; height: 1.1rem; border: 1px solid var(--line);
  border-radius: 3px; overflow: hidden; }
.bar span { min-width: 2px; } .bar span + span { border-left: 1px solid Canvas; }
.time { display: block; height: .7rem; background: var(--built); min-width: 1px; }
.hit { background: var(--hit); }
.built { background: repeating-linear-gradient(45deg, var(--built) 0 6px,
  color-mix(in srgb, var(--built) 75%, Canvas) 6px 9px); }
.failed { background: var(--failed); } .left { background: var(--left); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.name { font: .9rem ui-monospace, monospace; overflow-wrap: anywhere;
  min-width: 14rem; }
.wide { width: 30%; } .bad { color: var(--bad); } dt { float: left; min-width: 8rem; }
</style>
</head>
<body>
<main>
<h1>DeepGEMM warmup</h1>
<p>{{ summary }}</p>
<dl>
<dt>Built for</dt><dd>{{ report.target or "nothing was to build" }}</dd>
<dt>Rows</dt><dd>at most {{ report.max_tokens }} tokens a step, {{ report.mode }}</dd>
</dl>
{% if problems %}
<h2 class="bad">What needs a look</h2>
<ul>
{% for line in problems %}
<li>{{ line }}</li>
{% endfor %}
</ul>
{% endif %}
<h2>Entry points</h2>
<p>A call stands for a class of rows that take one kernel.
{% for part in parts %}
<span class="key {{ part }}"></span>{{ part }}
{% endfor %}
</p>
{% for row in coverage.entry_points %}
<section aria-label="{{ row.entry_point }}">
<h3>{{ row.entry_point }}</h3>
<div class="bar" role="img"
 aria-label="{{ row.entry_point }}, {{ describe(row.tally) }}">
{% for part in parts if row.tally[part] %}
<span class="{{ part }}" style="flex: {{ row.tally[part] }}"></span>
{% endfor %}
</div>
<p>{{ row.shapes }} shapes, {{ describe(row.tally) }};
{{ row.tally.kernels }} kernels built, {{ "%.1f" | format(row.tally.seconds) }} s</p>
<div class="scroll">
<table>
<thead><tr><th scope="col">Layers</th><th scope="col" class="n">count</th>
<th scope="col" class="n">planned</th>
{% for part in parts %}
<th scope="col" class="n">{{ part }}</th>
{% endfor %}
<th scope="col" class="n">kernels</th><th scope="col" class="n">seconds</th>
</tr></thead>
<tbody>
{% for family in row.families %}
<tr><th scope="row" class="name">{{ family.name }}{{
 " (adapter)" if family.by_adapter }}
</th><td class="n">{{ family.layers }}</td><td class="n">{{ family.tally.planned }}</td>
{% for part in parts %}
<td class="n">{{ family.tally[part] }}</td>
{% endfor %}
<td class="n">{{ family.tally.kernels }}</td>
<td class="n">{{ "%.1f" | format(family.tally.seconds) }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</section>
{% endfor %}
{% if coverage.unreached %}
<p>Not reached by this model: {{ coverage.unreached | join(", ") }}.</p>
{% endif %}
{% if report.unconfirmed %}
<h2>For no layer</h2>
<div class="scroll">
<table>
<thead><tr><th scope="col">Shape</th><th scope="col" class="n">kernels</th>
<th scope="col" class="n">built</th><th scope="col">reason</th></tr></thead>
<tbody>
{% for result in report.unconfirmed %}
<tr><th scope="row" class="name">{{ result.spec }}</th>
<td class="n">{{ result.calls | length }}</td>
<td class="n">{{ result.built | length }}</td><td>{{ result.unconfirmed }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% endif %}
{% for title, groups in (("Not registered", coverage.unregistered),
                         ("Left out", coverage.rejected)) if groups %}
<h2>{{ title }}</h2>
<div class="scroll">
<table>
<thead><tr><th scope="col">Layers</th><th scope="col" class="n">count</th>
<th scope="col">reason</th><th scope="col">entry points</th></tr></thead>
<tbody>
{% for group in groups %}
<tr><th scope="row" class="name">{{ group.family }}</th>
<td class="n">{{ group.layers }}</td><td>{{ group.reason }}</td>
<td>{{ group.entry_points | join(", ") }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% endfor %}
<h2>Functions that are knowingly not warmed</h2>
<div class="scroll">
<table>
<thead><tr><th scope="col">reason</th>
<th scope="col">functions of vllm.utils.deep_gemm</th></tr></thead>
<tbody>
{% for reason, functions in knowingly.items() %}
<tr><th scope="row">{{ reason }}</th>
<td class="name">{{ functions | join(", ") }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
<h2>Build times</h2>
{% if builds %}
<div class="scroll">
<table>
<thead><tr><th scope="col">Kernel</th><th scope="col">for</th>
<th scope="col" class="n">rows</th><th scope="col" class="n">seconds</th>
<th scope="col" class="wide">of the longest</th></tr></thead>
<tbody>
{% for build in builds %}
<tr><th scope="row" class="name">{{ build.name }}</th><td>{{ build.what }}</td>
<td class="n">{{ build.rows }}</td>
<td class="n">{{ "%.2f" | format(build.seconds) }}</td>
<td><span class="time" style="width: {{ "%.1f" | format(build.share) }}%"></span>
</td>
</tr>
{% endfor %}
</tbody>
</table>
</div>
{% if more_builds %}
<p>And {{ more_builds }} shorter ones, which the JSON report has.</p>
{% endif %}
{% else %}
<p>No kernel was built.</p>
{% endif %}
</main>
</body>
</html>
"""
