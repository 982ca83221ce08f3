"""Tiny models of families of transformers."""

import pytest

import families


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """`family(name, **fields)`: the directory of a tiny model, and the model."""
    made = {}

    def make(name, **fields):
        key = name, str(fields)
        if key not in made:
            path = tmp_path_factory.mktemp(name)
            made[key] = path, families.write_model(name, path, **fields)
        return made[key]

    return make
