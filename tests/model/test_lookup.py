"""Embeddings that become lookups of tables, and all others, which stay what the user made of them."""

import pytest
import torch
from torch import nn

from hpctrain.model.lookup import Lookup, build_with_tables


class Towers(nn.Module):
    """Draws numbers before, between and after its embeddings; with tables or without."""

    def __init__(self, tables: bool = True):
        super().__init__()
        self.before = nn.Linear(3, 3)
        if tables:
            self.users = nn.Embedding(50, 4)
        self.kinds = nn.Embedding(5, 4)
        if tables:
            self.items = nn.Embedding(70, 4)
        self.given = nn.Embedding.from_pretrained(torch.full((3, 2), 7.0))
        self.zeros = nn.Embedding(3, 2)
        nn.init.zeros_(self.zeros.weight)
        self.after = nn.Linear(3, 3)


@pytest.mark.parametrize("prefix", ("layers.0", ""))
def test_other_embeddings_and_layers_are_as_if_there_were_no_table(prefix):
    names = {f"{prefix}.{name}.weight".lstrip(".") for name in ("users", "items")}
    torch.manual_seed(5)
    layer, found = build_with_tables(Towers, prefix, names)
    torch.manual_seed(5)
    expected = Towers(tables=False).state_dict()
    assert found.keys() == names and all(isinstance(each, Lookup) for each in (layer.users, layer.items))
    assert layer.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in layer.state_dict().items())


def test_without_other_embeddings_a_layer_is_built_once():
    built = []

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            built.append(self)
            self.rows = nn.Embedding(4, 2)

    build_with_tables(Plain, "layers.1", {"layers.1.rows.weight"})
    assert len(built) == 1


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(50, 4)
        self.inner = nn.ModuleDict({"second": self.first})


@pytest.mark.parametrize("name", ("first", "inner.second"))
def test_a_table_under_two_names_is_one_lookup(name):
    layer, found = build_with_tables(Shared, "layers.0", {f"layers.0.{name}.weight"})
    (lookup,) = found.values()
    assert layer.first is lookup and layer.inner["second"] is lookup
    assert not list(layer.parameters())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(50, 4)
        self.out = nn.Linear(4, 50, bias=False)
        self.out.weight = self.rows.weight


def test_a_table_that_is_also_another_weight_is_refused():
    with pytest.raises(ValueError, match="layers.0.rows.weight, which is out.weight too; a table cannot be tied"):
        build_with_tables(Tied, "layers.0", {"layers.0.rows.weight"})
    with pytest.raises(ValueError, match="which is a layer itself"):
        build_with_tables(lambda: nn.Embedding(3, 2), "layers.0", {"layers.0.weight"})
