"""The PTX of our kernels, executed with the rule of programmatic dependent launch: a
program touches only what the host has copied, until it waits for the kernel before.

    python check_waits.py FOLDER [arguments of check_kernels.py]

FOLDER has check_kernels.py and ptx_emulator.py. Last, each kernel waits at its end, and
must be caught.
"""

import sys
from unittest.mock import patch

sys.path.insert(0, sys.argv.pop(1))

import check_kernels  # noqa: E402
import ptx_emulator as emulator  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from nanopaged.gpu.attention import TritonAttention  # noqa: E402

WAIT = "griddepcontrol.wait ;"


class Device(check_kernels.Device):
    """Knows which memory the host has filled."""

    def __init__(self, arch, memory):
        super().__init__(arch, memory)
        self.machine.uses_pdl = TritonAttention.uses_pdl = arch >= 90
        self.machine.copied = []

    def address(self, name, tensor):
        found = super().address(name, tensor)
        if name in ("items", "block_tables", "slots"):
            begin = found - tensor.storage_offset() * tensor.itemsize
            end = begin + tensor.untyped_storage().nbytes()
            self.machine.copied.append((begin, end))
        return found


class State(emulator.State):
    has_waited = False

    def look(self, address, mask, is_read=False):
        if self.has_waited or not self.machine.uses_pdl:
            return
        some = address if mask is None else address[mask]
        known = sum(((some >= begin) & (some < end) for begin, end
                     in self.machine.copied), start=some < 0)
        if len(some) and not (is_read and known.all()):
            raise emulator.Fault("memory is touched before the wait")

    def load(self, space, address, width, count, mask):
        if space == "global":
            self.look(address, mask, is_read=True)
        return super().load(space, address, width, count, mask)

    def store(self, space, address, values, width, mask):
        if space == "global":
            self.look(address, mask)
        super().store(space, address, values, width, mask)

    def copy(self, target, source, size, source_size, mask):
        self.look(source, mask)
        super().copy(target, source, size, source_size, mask)

    def unfinished(self):
        if self.machine.uses_pdl and not self.has_waited:
            raise emulator.Fault("a program ends without waiting")
        super().unfinished()


class Writer(emulator.Writer):
    def do_griddepcontrol(self, modifiers, operands):
        self.lines.append(f"S.has_waited |= {modifiers == ['wait']}")


def check_that_it_is_caught(name):
    """If a kernel waits at its end."""
    def change(kernel, ptx):
        late = ptx.replace(WAIT, "").replace("\tret;", f"\t{WAIT}\n\tret;")
        return late if kernel == name else ptx

    device = Device(90, emulator.GlobalMemory(1 << 30))
    device.change = change
    step = check_kernels.Step([(100, 1), (700, 1)], (4, 2, 64), torch.bfloat16)
    with device.catching(), pytest.raises(emulator.Fault, match="before the wait"):
        step.run(device)


def main():
    given = TritonAttention.__init__

    def init(self, *settings):
        given(self, *settings)
        del self.uses_pdl  # that of the class counts

    with (patch.object(check_kernels, "Device", Device),
          patch.multiple(emulator, State=State, Writer=Writer),
          patch.object(TritonAttention, "__init__", init)):
        code = check_kernels.main()
        for name in check_kernels.KERNELS:
            check_that_it_is_caught(name)
    return code


if __name__ == "__main__":
    sys.exit(main())
