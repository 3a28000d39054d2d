"""Which host something is on, as its kernel tells it."""

from relax_infer.contracts.base import Message


class HostIdentity(Message):
    """The same host only if all three agree; never Ray's node id, which changes with a raylet."""

    machine_id: str
    """Empty where there is none (many containers)."""
    boot_id: str
    """New at every boot."""
    pid_namespace: str

    def another_boot(self, then: "HostIdentity") -> bool:
        """Whether nothing of ``then`` can hold this host's devices: it ran under another boot, of
        this kernel or of another machine's, whose devices are its own. Says nothing of what became
        of it: that takes :meth:`booted_since`."""
        return then.boot_id != self.boot_id

    def booted_since(self, then: "HostIdentity") -> bool:
        """Whether it is the machine of ``then``, booted again: nothing of that time runs."""
        same_machine = bool(then.machine_id) and then.machine_id == self.machine_id
        return same_machine and then.boot_id != self.boot_id
