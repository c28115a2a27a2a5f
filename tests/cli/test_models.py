from __future__ import annotations

from weft.cli.models import list_models
from weft.config.shapes.model_spec import model_names


def test_table_has_a_row_for_each_model_with_its_shape(capsys):
    list_models()
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert set(model_names()) < set(rows)
    assert rows["name"] == ["name", "family", "parameters", "dim", "layers", "heads", "vocab", "context"]
    assert rows["llama3-8b"] == ["llama3-8b", "llama", "8.03", "B", "4096", "32", "32/8", "128256", "8192"]
    assert rows["gpt2"] == ["gpt2", "gpt2", "124", "M", "768", "12", "12", "50257", "1024"]
    assert rows["tiny"][-2] == "4096*"
    assert max(map(len, lines)) <= 80
