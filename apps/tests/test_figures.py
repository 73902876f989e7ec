import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bellmax_apps import figures


def picture(text: str, family: list[str]) -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.text(0.1, 0.5, text, family=family, parse_math=False)
    return figure


def test_characters_without_a_font_are_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.png"
    figures.save(picture("a中b文中", ["DejaVu Sans"]), path)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.strip().count("\n") == 0
    assert "a.png: no font here has 中 文, so boxes are drawn. Install one" in output.err
    assert path.stat().st_size > 0


@pytest.mark.parametrize("text", ["ção $x_1$ ∞", "ça"])
def test_common_characters_are_drawn_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    figures.save(picture(text, figures.fonts()), tmp_path / "a.pdf")
    assert capsys.readouterr().err == ""


def test_colour_fonts_are_left_out() -> None:
    """Matplotlib cannot draw color fonts."""
    coloured, plain = "NotoColorEmoji-Regular.ttf", "NotoEmoji-Regular.ttf"
    assert figures.useful([f"a/{coloured}", f"a/{plain}", "Symbola_hint.ttf"]) == ["Symbola_hint.ttf", f"a/{plain}"]


def test_a_damaged_font_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "NotoSansCJK-Regular.ttc").write_bytes(b"no font")
    monkeypatch.setattr(figures, "findSystemFonts", lambda: [str(tmp_path / "NotoSansCJK-Regular.ttc")])
    figures.fonts.cache_clear()
    assert figures.fonts() == ["DejaVu Sans"]
    figures.fonts.cache_clear()


def test_other_warnings_are_passed_on(tmp_path: Path) -> None:
    class Odd(Figure):
        def savefig(self, *args: object, **options: object) -> None:
            warnings.warn("odd", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="odd"):
        figures.save(Odd(), tmp_path / "a.png")
