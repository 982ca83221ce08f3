"""Print the oldest version that pyproject.toml allows of each dependency, for pip."""

import re
from pathlib import Path

project = Path(__file__).parents[1].joinpath("pyproject.toml").read_text("utf-8")
needed = re.search(r"^dependencies = \[$(.*?)^\]$", project, re.M | re.S)[1]
for name, version in re.findall(r'"([\w-]+)>=([\d.]+)', needed):
    print(f"{name}=={version}")
