"""What the paper reports, and what the figures of `memory` are called."""

from nanopaged.tour.workloads import DATA_SETS, SLOTS

# Figure 2: percent of KV memory that holds tokens. Figure 13:
# mean requests in a batch. Figure 15: percent of blocks saved, by samples or beams a
# request (for ShareGPT it gives the two ends only).
PAPER_TOKENS = {
    "Orca (max)": 20.4, "Orca (pow2)": 26.8, "Orca (oracle)": 38.2, "nanopaged": 96.3}
PAPER_RUNNING = {
    "Orca (max)": 7.0, "Orca (pow2)": 9.8, "Orca (oracle)": 13.6, "nanopaged": 30.4}
PAPER_SAVED: dict[str, dict[str, float]] = {
    "Alpaca, samples": {"2": 6.1, "4": 8.5, "6": 9.8},
    "Alpaca, beams": {"2": 37.6, "4": 53.1, "6": 55.2},
    "ShareGPT, samples": {"2": 16.2, "6": 30.5},
    "ShareGPT, beams": {"2": 44.3, "6": 66.3}}

SMALL_POOL = 768  # tokens, for the bundled model
PREEMPTED = 256  # tokens of the sequence whose preemption is timed

PROMPT, OUTPUT = DATA_SETS["ShareGPT"]
CAPTIONS = {
    "allocation": f"KV memory at full load: {SLOTS:,} slots, ShareGPT's mean lengths, "
    f"log-normal with sigma {PROMPT.sigma} in and {OUTPUT.sigma} out (the latter from "
    "the paper's figure for Orca (max)). The paper's numbers: its Fig 2 and 13. Ours: "
    "Orca's policies with a buddy allocator, simulated, and nanopaged's scheduler and "
    "block manager with a stand-in for the model.",
    "sharing": "Blocks saved by sharing, with 2, 4 and 6 sequences a request. The "
    "paper's numbers: its Fig 15. Ours: nanopaged's scheduler and block manager at "
    'full load; "beams" branch by probabilities that the bundled model gave, "real '
    'beams" are its own beam search, in its context of 1,024 tokens. Samples share '
    "only their prompt: of the same requests 6 save 5/3 of what 2 save. ShareGPT's "
    "30.5% and 16.2% are 1.9 apart: no one set of requests gives both.",
    "block size": "By block size, as in the paper's Fig 18; the figures are ours. "
    "Slots without a token and requests in a batch: nanopaged's scheduler and block "
    "manager at full load. Tokens/s: the bundled model, Alpaca's lengths, "
    f"{SMALL_POOL} slots.",
    "preemption": "Recompute and swap by block size, as in the paper's Fig 19; the "
    f"figures are ours, the bundled model's: the time to compute {PREEMPTED} tokens "
    "again, or to swap them out and in; then tokens/s of requests with Alpaca's "
    f"lengths in {SMALL_POOL} slots."}


