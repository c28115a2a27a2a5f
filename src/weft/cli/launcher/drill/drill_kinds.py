"""The faults that a drill knows, and what each stands for."""

from __future__ import annotations

from weft.errors import ConfigError, did_you_mean

#: Name -> what happens, in the words of the report.
KINDS: dict[str, str] = {
    "kill_rank": "a rank is killed (SIGKILL), as by the kernel when memory is short",
    "kill_in_save": "a rank is killed while a checkpoint is written",
    "segfault": "a rank crashes in compiled code (SIGSEGV)",
    "abort": "a rank aborts (SIGABRT)",
    "leave": "a rank leaves with an exit code and says nothing",
    "exception": "a step raises an exception",
    "memory": "a rank raises MemoryError",
    "loader": "the data loader raises an exception",
    "nan_gradient": "the loss and its gradients are NaN on one rank",
    "nan_weight": "the weights of a parameter turn into NaN on one rank",
    "stop_rank": "a rank is stopped (SIGSTOP) and does not go on",
    "hang": "a rank never comes to its next collective",
    "slow_rank": "a rank is slow for some seconds",
    "cut_link": "all TCP connections of a rank break",
    "full_disk": "the disk is full: a limit on file sizes (RLIMIT_FSIZE) until the next start",
    "read_only": "the checkpoint folder is read-only for two tries: mkdir gives EROFS",
    "flip_byte": "a byte of the newest checkpoint changes, then a rank is killed",
    "truncate": "a file of the newest checkpoint is cut in half, then a rank is killed",
    "lose_file": "a file of the newest checkpoint is deleted, then a rank is killed",
    "lose_manifest": "the manifest of the newest checkpoint is deleted, then a rank is killed",
    "lose_commit": "COMMIT of the newest checkpoint is deleted, then a rank is killed",
    "kill_launcher": "the launcher, with torch's agent in it, is killed; the command is typed again",
    "stop_launcher": "the launcher is stopped (SIGSTOP) for two seconds",
    "terminate": "a scheduler ends the command (SIGTERM); it is typed again",
    "terminate_rank": "one rank gets SIGTERM; the command is typed again",
    "clock_forward": "the clock of a rank jumps one hour forward",
    "clock_back": "the clock of a rank jumps one hour back",
    "port_taken": "port 29500 is taken by another program",
    "two_runs": "the same command is typed a second time while the first runs",
    "lose_rank": "a rank dies at every start: the run goes on with fewer",
}  # fmt: skip

#: Those that need a second rank, or in which a rank is lost for good.
NEED_TWO_RANKS = frozenset({"stop_rank", "cut_link", "lose_rank", "hang"})


def chosen(words: str, num_ranks: int) -> list[str]:
    """The kinds that --faults names; without any, all that suit so many ranks. ConfigError for an unknown one."""
    if not words:
        return [kind for kind in KINDS if num_ranks > 1 or kind not in NEED_TWO_RANKS]
    names = [word.strip() for word in words.split(",") if word.strip()]
    for name in names:
        if name not in KINDS:
            hint = did_you_mean(name, KINDS) or f" Known: {', '.join(KINDS)}."
            raise ConfigError(f"--faults {name}: there is no such fault.{hint}")
        if num_ranks < 2 and name in NEED_TWO_RANKS:
            raise ConfigError(f"--faults {name}: it needs two ranks, and the plan has one. Leave it out.")
    return names
