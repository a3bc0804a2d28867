"""Renders the report as one HTML page, which loads nothing from a network.

    page.html                  the template
    page.css, plot.js, page.js are written into the page
    tables.py, chart.py        the cells; the data of the charts
    texts.json, phrases.py     its texts in both languages

Everything from a log, an event file or a name is escaped. The Content-Security-Policy of the page
lets a browser run only the script and apply only the style with the hashes that it names, so that
nothing that got into the page would run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from mindresume.formatting import shortened, shown, size_text, span_text
from mindresume.report import tables
from mindresume.report.advice import advice_of, sentence_of
from mindresume.report.builder import Report, defect_of, looked_for
from mindresume.report.chart import chart_data
from mindresume.report.phrases import LANGUAGES, TEXTS, Phrase, as_json, counted, phrase
from mindresume.typed import json_value

FOLDER = Path(__file__).parent
TEMPLATE = "page.html"
SCRIPTS = ("plot.js", "page.js")  # one script of the page, in this order
SCRIPT = "".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
STYLE = (FOLDER / "page.css").read_text(encoding="utf-8")


def html(report: Report) -> str:
    """Returns the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def printed(value: Any) -> Any:
        """Escapes hidden characters of names and texts. A phrase carries itself, for the script.
        Markup is printed as it is."""
        if isinstance(value, Phrase):
            return Markup('<span data-t="{}">{}</span>').format(marked(value), plain(value))
        return value if isinstance(value, Markup) else plain(value)

    def plain(value: Any) -> str:
        return str.__str__(shown(value, keep="\n"))

    def marked(value: Phrase) -> str:
        return json.dumps(as_json(value), ensure_ascii=False, separators=(",", ":"))

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        finalize=printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "span": span_text,
        "moment": tables.moment,
        "size": size_text,
        "number": tables.number_text,
        "percent": tables.percent,
        "shortened": lambda text: shortened(text, tables.REASON),
        "marked": marked,
        "in_attribute": lambda value: Markup.escape(plain(value)),
    }
    environment.globals |= {
        "t": phrase,
        "counted": counted,
        "tables": tables,
        "defect_of": defect_of,
    }
    data = {
        "texts": {
            name: {key: forms[column] for key, forms in TEXTS.items()}
            for name, column in LANGUAGES.items()
        },
        "chart": chart_data(report),
    }
    advice = advice_of(report)
    return environment.get_template(TEMPLATE).render(
        report=report,
        title=phrase("title.of", output=report.output),
        policy=policy(),
        css=Markup(STYLE),
        js=Markup(SCRIPT),
        data=Markup(json_block(data)),
        looked_for=looked_for(report),
        advice=sentence_of(advice) if advice else "",
    )


def policy() -> str:
    """Returns the Content-Security-Policy of the page: nothing is loaded, only its own style and
    script are used, and no text can become markup (trusted types)."""
    script, style = (
        "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (SCRIPT, STYLE)
    )
    return (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; base-uri 'none'; "
        f"form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def json_block(value: Any) -> str:
    """Returns ``value`` as JSON for a script element, in ASCII: numbers that are not finite are
    null, and nothing can end the element or begin a comment in it."""
    text = json.dumps(json_value(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
