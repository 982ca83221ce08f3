"""A pytest plugin for `run.py`: a line of JSON for every test, as soon as it is over.

A run that is cut off keeps what it has found, and its last line names the test that
ran. REPORT is the file. REPORT_SHARD=i/n leaves every n-th test to this process.
"""

import json
import os


def write(nodeid: str, outcome: str, **more: object) -> None:
    with open(os.environ["REPORT"], "a") as file:
        file.write(json.dumps({"test": nodeid, "outcome": outcome, **more}) + "\n")


def pytest_collection_modifyitems(items):
    shard, count = map(int, os.environ.get("REPORT_SHARD", "0/1").split("/"))
    items[:] = items[shard::count]


def pytest_runtest_logstart(nodeid):
    write(nodeid, "started")


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        write(
            report.nodeid,
            report.outcome,
            seconds=round(report.duration, 2),
            text=report.longreprtext if report.failed else "",
        )
