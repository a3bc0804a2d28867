"""``import mindresume``: light, and every name of the API is found when it is used."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mindresume

PACKAGE = Path(mindresume.__file__).parent
FRAMEWORKS = "mindspore", "mindformers", "torch", "transformers"


def loaded(code):
    """Returns the names of the modules that a new process has after ``code``."""
    code += "\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_the_help_is_light():
    code = (
        "import sys; sys.argv = ['mindresume', '--help']; from mindresume import cli\ntry: "
        "cli.main()\nexcept SystemExit: pass"
    )
    found = loaded(code)
    assert "mindresume.cli.catalog" in found
    assert not found & {*FRAMEWORKS, "numpy", "ml_dtypes", "safetensors"}
    rooms = tuple(f"mindresume.{room}" for room in ("reshard", "resume", "formats"))
    assert not [name for name in found if name.startswith(rooms)]


def test_names():
    assert all(getattr(mindresume, name) is not None for name in mindresume.__all__)
    assert set(mindresume.__all__) <= set(dir(mindresume)) and mindresume.open is mindresume.open
    with pytest.raises(AttributeError, match="nothing"):
        mindresume.nothing  # noqa: B018


def test_the_table_is_what_type_checkers_see():
    """The names are written three times: for type checkers, for the first use, for ``import *``."""
    import ast

    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module.removeprefix("mindresume.")
        for node in block.body
        for alias in node.names
    }
    assert typed == mindresume._MODULE_OF and sorted(typed) == sorted(mindresume.__all__)
    assert (PACKAGE / "py.typed").exists()


def test_only_the_command_line_and_the_report_import_the_api():
    """The API is above all other packages but the command line, and the report, whose advice is a
    result of the API."""
    found = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if re.search("(from|import) mindresume.api", path.read_text(encoding="utf-8"))
    }
    assert found == {"api", "cli", "report", "__init__.py"}


def test_the_import_is_light_and_no_name_of_the_api_needs_a_framework():
    found = loaded("import mindresume")
    assert {name for name in found if name.startswith("mindresume.")} == set()
    assert not found & {*FRAMEWORKS, "numpy", "yaml", "typer", "rich", "ml_dtypes", "safetensors"}
    found = loaded("from mindresume import *")
    assert "mindresume.api.catalog" in found and not found & {*FRAMEWORKS, "safetensors", "typer"}
