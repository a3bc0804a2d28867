"""The report as one HTML page: no script, no font, nothing from a network. Whatever comes from a log or a name is escaped."""
from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape as escape_html

from mindresume.formatting import shown, size_text
from mindresume.report.account import Share, total_of
from mindresume.report.disk import Checkpoint
from mindresume.report.history import DIED, NORMAL, RUNNING, UNKNOWN, Life
from mindresume.report.made import Report, looked_for
from mindresume.resume.survey import COMPLETE, NODE_LOCAL


def escape(text: str) -> str:
    """As it is to be read: no markup, and no hidden character but line breaks."""
    return escape_html(shown(text, keep="\n"))


SHOWN = 2000                    # rows of a table; the JSON document has all
REASON = 400                    # characters of a reason

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1.25rem 4rem; background: #fff; color: #1d262d;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 62rem; } .quiet { color: #55626c; } .path, code { font-family: ui-monospace, Menlo, monospace;
       font-size: .88em; overflow-wrap: anywhere; }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.6rem, 1fr)); gap: .75rem; margin: 1.2rem 0; }
dl.tiles div { border: 1px solid #dde3e8; border-radius: .5rem; padding: .6rem .85rem; background: #f8fafb; }
dt { color: #55626c; font-size: .85rem; } dd { margin: 0; } dd.big { font-size: 1.45rem; font-weight: 600; line-height: 1.25; }
dd.more { font-size: .85rem; color: #3c4952; }
figure { margin: 1.2rem 0 .5rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption { color: #55626c; font-size: .88rem; margin-top: .4rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; color: #55626c; font-size: .88rem; padding: 0 0 .45rem; }
th, td { text-align: left; padding: .38rem .75rem .38rem 0; border-bottom: 1px solid #e6ebef; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
       white-space: nowrap; } td.keep { white-space: nowrap; } td.reason { overflow-wrap: anywhere; min-width: 14rem; }
.bad { color: #9c1f18; font-weight: 600; } .good { color: #14694b; } .lost { color: #8a4b08; font-weight: 600; }
.bar { display: inline-block; height: .6rem; border-radius: 2px; vertical-align: middle; min-width: 1px; }
ul { padding-left: 1.2rem; margin: .4rem 0; } details { margin: .6rem 0; } summary { cursor: pointer; }
"""
HATCHED = "repeating-linear-gradient(-45deg,#fff 0 2px,#8b97a1 2px 3px)"
COLOURS = {"training": "#1f5f8b", "lost": "#f2a65a", "saving": "#4d5b66", "starting": "#aeb9c2", "ending": "#aeb9c2",
           "down": HATCHED, "waiting": HATCHED}
SPENT = (("training", "Training that counts", "from the first step to the last, of steps that the training now contains"),
         ("lost", "Training that was lost", "steps behind the checkpoint from which the next start went on"),
         ("saving", "Saving", "the training stood still for a checkpoint; what is written behind it is not counted"),
         ("starting", "Starting", "from mindformers' first words to the first step: loading, compilation"),
         ("ending", "Ending", "from the last step to the last line: waiting for the last save"),
         ("down", "Down", "from a death to the next start; importing and scheduling the job is in it"),
         ("waiting", "Waiting", "from a normal end to the next start"))


def html(report: Report, drawing: str) -> str:
    """``drawing``: SVG, put in as it is; empty if there is nothing to draw."""
    body = [_head(report)]
    if report.shares:
        body += [_tiles(report), _figure(report, drawing), _lives(report.shares), _refusals(report.lives), _time(report.shares)]
    else:
        body.append(_no_logs(report))
    body += [_checkpoints(report), _sources(report)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training report: {escape(report.output)}</title>
<style>{STYLE}</style>
</head>
<body>
{chr(10).join(body)}
</body>
</html>
"""


def sentence(report: Report) -> str:
    """The report in one line."""
    if not report.shares:
        return f"no logs of a training in {report.output}; {len(report.disk.checkpoints)} checkpoints on disk"
    died, seconds = sum(life.end == DIED for life in report.lives), total_of(report.shares)
    return (f"{_count(len(report.shares), 'start')}, {died} died; step {_text(report.reached)} reached, {report.steps_lost} of "
            f"{report.steps_done} steps lost; {span_text(seconds.total)}, {_percent(seconds.training, seconds.total)} of it "
            f"training that counts")


# ---- parts -----------------------------------------------------------------------------------------------------------

def _head(report: Report) -> str:
    words = ""
    if report.shares:
        first, last = report.lives[0].started, report.lives[-1].ended
        words = f" From {_moment(first)} to {_moment(last)} ({span_text(last - first)})."
    return (f'<h1>Training report</h1>\n<p class="path">{escape(report.output)}</p>\n'
            f'<p class="quiet">{escape(sentence(report))}.{words}</p>')


def _tiles(report: Report) -> str:
    lives, seconds = report.lives, total_of(report.shares)
    died = sum(life.end == DIED for life in lives)
    done = [save for life in lives for save in life.saves if save.done]
    last = lives[-1]
    state = {RUNNING: "the last one is running", UNKNOWN: "how the last one ended is not known", DIED: "the last one died"}.get(
        last.end, f"the last one: {last.end}")
    rows = [("Starts", str(len(lives)), f"{died} died; {state}"),
            ("Step reached", _text(report.reached), f"{report.steps_done} steps were done for it"),
            ("Steps lost", str(report.steps_lost), f"{_percent(report.steps_lost, report.steps_done)} of the steps done"
             + (f"; {report.not_safe} more are behind the newest checkpoint" if report.not_safe else "")),
            ("Training that counts", _percent(seconds.training, seconds.total),
             f"{span_text(seconds.training)} of {span_text(seconds.total)}"),
            ("Lost to deaths", span_text(seconds.lost + seconds.down),
             f"{span_text(seconds.lost)} training, {span_text(seconds.down)} down"),
            ("Saves", str(len(done)), f"training stopped for {span_text(seconds.saving)} "
             f"({_percent(seconds.saving, seconds.total)})")]
    tiles = "\n".join(f'<div><dt>{escape(name)}</dt><dd class="big">{escape(value)}</dd>'
                      f'<dd class="more">{escape(more)}</dd></div>' for name, value, more in rows)
    return f'<dl class="tiles">\n{tiles}\n</dl>'


def _figure(report: Report, drawing: str) -> str:
    if not drawing:
        return ""
    died = [life for life in report.lives if life.end == DIED and life.last_step is not None]
    alt = (f"Loss over steps 1 to {_text(report.reached)}, and below it the time of each life. {escape(sentence(report))}. "
           + "; ".join(f"life {life.number} died at step {life.last_step}" for life in died[:20]))
    picture = drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
    return (f'<h2>What happened</h2>\n<figure>\n{picture}\n<figcaption>Above: the loss as the log has it; saves at the bottom. '
            'Orange steps were done and lost: the next life went on from a checkpoint before them and did them again; darker: '
            'more often. Below: the time, with a cross at each death and a tick at each save.</figcaption>\n</figure>')


def _lives(shares: Sequence[Share]) -> str:
    rows = []
    for share in shares[-SHOWN:]:
        life, done = share.life, [save for save in share.life.saves if save.done]
        failed = sum(bool(save.problem) for save in life.saves)
        kind = "good" if life.end in NORMAL else "bad" if life.end == DIED else ""
        steps = "none" if life.first_step is None else f"{life.first_step} to {life.last_step}"
        saves = "; ".join([str(len(done)), *([f"{failed} failed"] if failed else []),
                           *([f"{life.skipped} skipped"] if life.skipped else [])])
        rows.append(_row([
            (str(life.number), "number"), (escape(life.run or "?"), "keep"),
            (f"{'before ' if life.cut else ''}{_moment(life.started)}", "keep"),
            (f'<span class="{kind}">{escape(life.end)}</span>' + (f"<br>{_reason(life.why)}" if life.why else ""), "reason"),
            (_origin(life), ""), (steps, "number"),
            (f'<span class="lost">{share.steps_lost}</span>' if share.steps_lost else "0", "number"), (saves, "number"),
            (span_text(life.ended - life.started), "number"),
        ]))
    head = (("life", "number"), ("run", ""), ("started", ""), ("ended", ""), ("resumed from", ""), ("steps", "number"),
            ("steps lost", "number"), ("saves", "number"), ("lasted", "number"))
    more = f" The last {SHOWN} of {len(shares)} are shown." if len(shares) > SHOWN else ""
    return _table("Lives", "One row for each start of the job. Steps lost: done in this life, and not contained in what was "
                           f"trained on later.{more}", head, rows)


def _origin(life: Life) -> str:
    if life.resumed_from is not None:
        scaled = f" (counted on as step {life.base})" if life.scale != 1 else ""
        return f"step {life.resumed_from}{scaled}" + (" (inferred)" if life.inferred else "")
    if life.fresh:
        return "fresh start"
    return "the beginning (inferred)" if life.first_step is not None else "it had not chosen yet"


def _refusals(lives: Sequence[Life]) -> str:
    rows = [_row([(str(life.number), "number"), (_text(refusal.step), "number"), (_reason(refusal.reason), "reason")])
            for life in lives for refusal in life.refused]
    rows += [_row([(str(life.number), "number"), (str(save.step), "number"), ("failed save: " + _reason(save.problem), "reason")])
             for life in lives for save in life.saves if save.problem]
    if not rows:
        return ""
    return _table("Refused checkpoints and failed saves", "What each start did not resume from, and what was not saved.",
                  (("life", "number"), ("step", "number"), ("reason", "")), rows[:SHOWN])


def _time(shares: Sequence[Share]) -> str:
    seconds, rows = total_of(shares), []
    for name, title, meaning in SPENT:
        value = getattr(seconds, name)
        if value or name in ("training", "lost", "saving", "down"):
            width = 0 if not seconds.total else 9 * value / seconds.total
            rows.append(_row([(title, "keep"), (span_text(value), "number"), (_percent(value, seconds.total), "number"),
                              (f'<span class="bar" style="width:{width:.2f}rem;background:{COLOURS[name]}"></span>', "keep"),
                              (meaning, "reason")]))
    rows.append(_row([("<b>Together</b>", "keep"), (f"<b>{span_text(seconds.total)}</b>", "number"), ("100 %", "number"),
                      ("", ""), ("from the first start to the last line", "reason")]))
    note = ('<p class="quiet">Measured: the times of the log lines, the seconds of saves, and the steps. Inferred: a process '
            'that is killed writes no line, so it is taken to have died at its last one; the first step is taken to be as long '
            'as an ordinary one, and what it took longer is compilation.</p>')
    return _table("Where the time went", "All seconds between the first start and the last line, each counted once.",
                  (("", ""), ("time", "number"), ("share", "number"), ("", ""), ("what it is", "")), rows) + note


def _checkpoints(report: Report) -> str:
    disk = report.disk
    if not disk.exists:
        return f'<h2>Checkpoints on disk</h2>\n<p>There is no folder <span class="path">{escape(disk.root)}</span>.</p>'
    if not disk.checkpoints:
        return f'<h2>Checkpoints on disk</h2>\n<p>There are none in <span class="path">{escape(disk.root)}</span>.</p>'
    rows = [_row([(_text(row.step), "number"), (_text(row.epoch), "number"), (escape(row.run or "mindformers alone"), "keep"),
                  (str(row.ranks), "number"), (size_text(row.size), "number"), (escape(row.format), ""),
                  ("yes" if row.committed else "no", ""), (_moment(row.saved_at) if row.saved_at else "?", "keep"),
                  (_state(row), "reason")]) for row in disk.checkpoints[:SHOWN]]
    return _table("Checkpoints on disk", f"Now in {disk.root}, in the order in which a resume tries them. Names, records and "
                                         f"sizes are checked, contents are not: that is what mindresume verify does.",
                  (("step", "number"), ("epoch", "number"), ("run", ""), ("ranks", "number"), ("size", "number"), ("format", ""),
                   ("committed", ""), ("saved", ""), ("state", "")), rows)


def _state(row: Checkpoint) -> str:
    return (f'<span class="{"good" if row.state in (COMPLETE, NODE_LOCAL) else "bad"}">{escape(row.state)}</span>'
            + (f"<br>{_reason(row.reason)}" if row.reason else ""))


def _no_logs(report: Report) -> str:
    items = "".join(f'<li class="path">{escape(path)}</li>' for path in looked_for(report))
    return (f"<p>No logs of a training were found, so there are no lives, no losses and no times here. Looked for:</p>\n"
            f"<ul>{items}</ul>\n<p>If the logs are elsewhere (LOG_MF_PATH, LOG_DIR of msrun_launcher.sh), name their folder with "
            f"<code>--logs</code>.</p>")


def _sources(report: Report) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in (*report.notes, *report.disk.notes))
    read = "".join(f'<li class="path">{escape(path)}</li>' for path in report.read[:SHOWN])
    words = (f'<details><summary>{_count(len(report.read), "log file")} read, of rank {_text(report.rank)}</summary>'
             f'<ul>{read}</ul></details>')
    return ("<h2>Sources</h2>\n" + (f"<ul>{notes}</ul>\n" if notes else "") + (words if report.read else "")
            + '<p class="quiet">Times are local, as the log has them. All of it as numbers: '
              '<code>mindresume report --json</code>.</p>')


# ---- words -----------------------------------------------------------------------------------------------------------

def span_text(seconds: float) -> str:
    """'0.32 s', '47 s', '12 min 05 s', '3 h 20 min', '2 d 4 h'"""
    if seconds < 10:
        return f"{max(seconds, 0):.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _table(title: str, caption: str, head: Iterable[tuple[str, str]], rows: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col"{_class(kind)}>{escape(name)}</th>' for name, kind in head)
    return (f'<h2>{escape(title)}</h2>\n<div class="wide"><table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{cells}</tr>'
            f'</thead>\n<tbody>\n' + "\n".join(rows) + "\n</tbody>\n</table></div>")


def _row(cells: Iterable[tuple[str, str]]) -> str:
    """``cells``: HTML and class."""
    return "<tr>" + "".join(f"<td{_class(kind)}>{text}</td>" for text, kind in cells) + "</tr>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _reason(text: str) -> str:
    return escape(text if len(text) <= REASON else text[:REASON] + " ...")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _percent(part: float, whole: float) -> str:
    if not whole:
        return "0 %"
    value = 100 * part / whole
    if 0 < value < 0.05:
        return "< 0.1 %"
    return f"{value:.1f} %" if 0 < value < 10 else f"{value:.0f} %"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _text(value: int | None) -> str:
    return "?" if value is None else str(value)
