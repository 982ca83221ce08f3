"""What programs for vLLM get back: its names, and the text of every token."""

from collections import Counter as Counts
from dataclasses import dataclass, make_dataclass
from types import SimpleNamespace

import nanopaged
from nanopaged.frontend.detokenizer import Detokenizer


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(nanopaged.CompletionOutput):
    lora_request = None

    def finished(self):
        return self.finish_reason is not None


class RequestOutput(nanopaged.RequestOutput):
    metrics = lora_request = encoder_prompt = encoder_prompt_token_ids = None


Counter, Gauge = (make_dataclass(kind, ["name", "labels", "value"])
                  for kind in ("Counter", "Gauge"))


class Writer:
    """It writes what nanopaged returns as vLLM would, and counts tokens."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.counts = Counts(prefix_cache_hits=0, prompt_tokens=0, generation_tokens=0)

    def request(self, output, params, told):
        """`told` keeps the log-probabilities of earlier outputs of this request."""
        if output.finished:
            self.counts.update(
                prompt_tokens=len(output.prompt_token_ids),
                prefix_cache_hits=output.num_cached_tokens,
                generation_tokens=sum(len(each.token_ids) for each in output.outputs))
        answers = []
        for answer in output.outputs:
            ids, stop = answer.token_ids, answer.stop_reason
            if params.include_stop_str_in_output and answer.finish_reason == "stop":
                answer.text = answer.text + stop if isinstance(stop, str) else (
                    self.whole_text(output.prompt_token_ids, ids, params))
            answer.text = answer.text if params.detokenize else ""
            answer.logprobs = self.tables(answer.logprobs, told[answer.index])
            answers.append(CompletionOutput(**vars(answer)))
        return RequestOutput(**vars(output) | {
            "outputs": answers,
            "prompt_logprobs": self.tables(output.prompt_logprobs, told["prompt"])})

    def beams(self, output):
        """The prompt is part of a beam's tokens and text."""
        sequences = []
        for beam in output.outputs:
            tokens = output.prompt_token_ids + beam.token_ids
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            sequences.append(SimpleNamespace(**vars(beam) | {
                "tokens": tokens, "text": text, "cum_logprob": beam.cumulative_logprob,
                "logprobs": self.tables(beam.logprobs, []), "lora_request": None}))
        return SimpleNamespace(sequences=sequences)

    def tables(self, tables, told):
        """Log-probabilities, each with the text of its token."""
        for table in (tables or [])[len(told) :]:
            before = [next(iter(each)) for each in told[-4:] if each]
            told.append(table and {token: Logprob(*each, self.text(token, before))
                                   for token, each in table.items()})
        return tables and [*told]

    def whole_text(self, prompt, ids, params):
        """The text of an answer with its last token, which has ended it."""
        reader = Detokenizer(self.tokenizer, prompt, [], params.skip_special_tokens)
        reader.update([*prompt, *ids], final=True, may_stop=False)
        return reader.text

    def text(self, token, before, skip_special_tokens=False):
        """The text of a token after others. A character that several tokens spell is
        the text of the last of them.
        """
        reader = Detokenizer(self.tokenizer, before, [], skip_special_tokens)
        reader.has_begun = True
        reader.update([*before, token], final=False, may_stop=False)
        return reader.text if self.tokenizer else None
