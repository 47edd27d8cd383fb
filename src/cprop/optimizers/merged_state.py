"""A wrapper's state: the inner optimizer's and CProp's, kept apart, and shown as one.

An inner optimizer must not see CProp's entries: many initialize a parameter's state if it is empty. Nor may they be
taken out for the time of its step, because whatever interrupts or observes that step would find none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from cprop.statistics import PREFIX

__all__ = ["MergedState", "Statistics", "is_own", "split"]

Statistics: TypeAlias = defaultdict[Tensor, dict[str, Any]]
"""CProp's entries of each parameter."""


def is_own(key: Any) -> bool:
    """Whether a state entry is CProp's."""
    return isinstance(key, str) and key.startswith(PREFIX)


def split(entries: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """CProp's entries of a parameter, and the others."""
    own = {key: value for key, value in entries.items() if is_own(key)}
    return own, {key: value for key, value in entries.items() if key not in own}


class ParameterState(MutableMapping[str, Any]):
    """One parameter's entries: the inner optimizer's, then CProp's. A new entry goes where its name says."""

    def __init__(self, inner: MutableMapping[Any, Any], statistics: Statistics, p: Tensor) -> None:
        self._inner, self._statistics, self._p = inner, statistics, p

    def _side(self, key: str) -> MutableMapping[Any, Any]:
        return self._statistics if is_own(key) else self._inner

    def __getitem__(self, key: str) -> Any:
        return self._side(key).get(self._p, {})[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._side(key).setdefault(self._p, {})[key] = value

    def __delitem__(self, key: str) -> None:
        del self._side(key).get(self._p, {})[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._inner.get(self._p, ()), *self._statistics.get(self._p, ())])

    def __len__(self) -> int:
        return len(self._inner.get(self._p, ())) + len(self._statistics.get(self._p, ()))

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        """The entries as an ordinary dictionary, which a copy or a pickle is too."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class MergedState(MutableMapping[Any, Any]):
    """The state of a wrapper, by parameter, like the ``defaultdict`` of other optimizers.

    Entries under other keys than parameters, which some optimizers have, are the inner optimizer's.
    """

    def __init__(self, inner: Optimizer, statistics: Statistics) -> None:
        self._inner, self._statistics = inner, statistics

    def __getitem__(self, key: Any) -> Any:
        entries = self._inner.state.get(key)
        if isinstance(key, Tensor) and (entries is None or isinstance(entries, MutableMapping)):
            return ParameterState(self._inner.state, self._statistics, key)
        return self._inner.state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, Tensor) or not isinstance(value, Mapping):
            self._inner.state[key] = value
            return
        own, others = split(value)
        if own:
            self._statistics[key] = own
        else:
            self._statistics.pop(key, None)
        if others or not own:
            self._inner.state[key] = others
        else:
            self._inner.state.pop(key, None)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        self._inner.state.pop(key, None)
        self._statistics.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._inner.state or key in self._statistics

    def __iter__(self) -> Iterator[Any]:
        inner = self._inner.state
        return iter([*inner, *(p for p in self._statistics if p not in inner)])

    def __len__(self) -> int:
        return len(self._inner.state.keys() | self._statistics.keys())

    def __repr__(self) -> str:
        return repr(dict(self))

    # The inherited methods rely on a missing key to raise, and on a value to survive the deletion of its key.

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a ``defaultdict``: a missing parameter is not added."""
        return self[key] if key in self else default  # noqa: SIM401

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """As of a dictionary; a parameter's entries are an ordinary one."""
        if key not in self and default:
            return default[0]
        value = plain(self[key])
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        """As :meth:`pop`, of the first key."""
        for key in self:
            return key, self.pop(key)
        raise KeyError("the state is empty")

    def clear(self) -> None:
        """Reset both."""
        self._inner.state.clear()
        self._statistics.clear()

    def copy(self) -> defaultdict[Any, Any]:
        """The state as ordinary dictionaries, which a copy or a pickle consists of too."""
        return defaultdict(dict, {key: plain(value) for key, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self.copy()))


def plain(value: Any) -> Any:
    """A parameter's entries as an ordinary dictionary."""
    return value.copy() if isinstance(value, ParameterState) else value
