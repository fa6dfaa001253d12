"""Facts of the models that are trained: in which mode their modules are, what is loaded into them,
and what they train.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.utils.torch.frames import program_frames
from fastcheck.utils.torch.readable import is_materialised

from .averages import StaleStatistics
from .chains import UPDATES, held
from .identities import is_itself, is_untied, repeated
from .streaks import EVERY, LAST_LOOK, LOOKS, Streaks, names_of

# Passes without gradients in a row, between two that have some.
_PASSES = 3
# A momentum of batch norm from which on its statistics are nearly those of the last batch.
_LARGE_MOMENTUM = 0.9
_MOST_TRAINED = 0.02
_MOST_DROPPED = 0.75
# Names by which programs mean to freeze, where torch reads no attribute of that name.
_FROZEN = ("requires_grad", "require_grad", "require_grads", "requires_grads", "required_grad")


class ModelFacts:
    """Notices facts of the models. ``optimizers``: those that have stepped."""

    def __init__(
        self,
        streaks: Streaks,
        nodes: Sequence[ModuleNode],
        optimizers: Collection[torch.optim.Optimizer],
    ) -> None:
        self._streaks = streaks
        self._optimizers = optimizers
        # The modules that are looked at.
        kinds = _DropoutNd, _BatchNorm
        self._nodes = [n for n in nodes if n.is_root or isinstance(n.module(), kinds)]
        self._statistics = StaleStatistics()

    def pass_without_gradients(self, node: ModuleNode) -> None:
        """Takes in that a forward pass of this module without gradients has ended."""
        module = node.module()
        if module is None or {"dropout_on", "statistics_on"} <= self._streaks.told:
            return
        # One that is not trained, as a teacher, has no training pass in between.
        if not node.is_primary and (not self._optimizers or self._streaks.updates > LAST_LOOK):
            return
        modal = [m for m in module.modules() if m.training and _has_modes(m)]
        drops = [m for m in modal if isinstance(m, _DropoutNd)]
        about = f"{type(drops[0]).__name__}, p={drops[0].p:g}" if drops else ""
        if not node.is_primary:
            is_apart = bool(drops) and held(self._optimizers).isdisjoint(
                map(id, module.parameters())
            )
            about += f", in {node.path or type(module).__name__}, which no optimizer holds"
            self._streaks.count("dropout_on", is_apart, about, id(node), times=UPDATES)
            return
        self._streaks.count("dropout_on", bool(drops), about, times=_PASSES)
        norms = [m for m in modal if isinstance(m, _BatchNorm)]
        about = _counted(norms)
        self._streaks.count("statistics_on", bool(norms), about, times=_PASSES)

    def loading(self, module: torch.nn.Module, weights: Any) -> None:
        """load_state_dict() of this module is about to be given these."""
        if self._streaks.updates and is_itself(module, weights) and self._is_of_models(module):
            count = sum(1 for _ in module.parameters())
            self._streaks.tell_once("loaded_itself", count, _place_of_program().lstrip())

    def loaded(self, module: torch.nn.Module, keys: Any) -> None:
        """load_state_dict() of this module has left out these keys, and found no weight for
        others.
        """
        names = [name for name, _ in module.named_parameters()]
        if names and set(names) <= set(keys.missing_keys) and self._is_of_models(module):
            about = f"{keys.unexpected_keys[0]}, not {names[0]}{_place_of_program()}"
            self._streaks.tell_once("loaded_nothing", len(keys.unexpected_keys), about)

    def installed(self) -> list[torch.nn.Module]:
        """The models that were passed to ``install()``, as far as they are there."""
        return [root for node in self._nodes if node.is_root and (root := node.module())]

    def _is_of_models(self, module: torch.nn.Module) -> bool:
        roots = self.installed()
        is_part = any(module in root.modules() for root in roots)
        return is_part or any(root in module.modules() for root in roots)

    def look(self) -> None:
        """Looks at them, before an update."""
        self._look_at_modes()
        if self._streaks.updates == EVERY:
            self._look_at_shares()
            self._look_at_attributes()
            self._look_at_ties()

    def _look_at_modes(self) -> None:
        modules = [module for node in self._nodes if (module := node.module()) is not None]
        roots = [node.module() for node in self._nodes if node.is_root]
        modal = [module for module in modules if _has_modes(module)]
        is_off = bool(modal) and not any(m is not None and m.training for m in (*modal, *roots))
        frozen = [module for module in modal if module.training and _is_frozen_norm(module)]
        about = _counted(frozen)
        self._streaks.count("frozen_norms", bool(frozen), about, times=LOOKS)
        norms = [m for m in modal if m.training and _averages_little(m)]
        about = f"{_counted(norms)}, momentum={norms[0].momentum:g}" if norms else ""
        self._streaks.count("norm_momentum", bool(norms), about, times=LOOKS)
        drops = [
            m for m in modal if isinstance(m, _DropoutNd) and m.training and m.p > _MOST_DROPPED
        ]
        about = f"{_counted(drops)}, p={drops[0].p:g}" if drops else ""
        self._streaks.count("dropped_most", bool(drops), about, times=LOOKS)
        self._streaks.count("evaluation_mode", is_off, _counted(modal), times=LOOKS)
        if "stale_statistics" not in self._streaks.told:
            stale = self._statistics.look(self._nodes, held(self._optimizers))
            self._streaks.count("stale_statistics", bool(stale), stale, times=LOOKS)

    def _look_at_shares(self) -> None:
        parameters = [s for s in self._streaks.stored() if is_materialised(s[2])]
        trained = [stored for stored in parameters if stored[2].requires_grad]
        whole = sum(p.numel() for _, _, p in parameters)
        part = sum(p.numel() for _, _, p in trained)
        if trained and part <= _MOST_TRAINED * whole:
            self._streaks.tell("frozen", part, f"{part:,} of {whole:,}: {names_of(trained)}")

    def _look_at_attributes(self) -> None:
        """Modules and parameters that were to be frozen by an attribute which torch does not
        read.
        """
        ids = held(self._optimizers)
        roots = [(node, root) for node in self._nodes if node.is_root and (root := node.module())]
        for node, root in roots:
            for path, module in root.named_modules(prefix=node.path):
                name = path or type(root).__name__
                own = module.named_parameters(prefix=name, recurse=False)
                owners = [(name, module, list(module.parameters())), *((n, p, [p]) for n, p in own)]
                for name, owner, of in owners:
                    found = next((a for a in _FROZEN if vars(owner).get(a) is False), None)
                    if found and of and all(p.requires_grad and id(p) in ids for p in of):
                        self._streaks.tell_once("attribute", len(of), f"{name}.{found}")

    def _look_at_ties(self) -> None:
        if any(node.is_primary and is_untied(node.module()) for node in self._nodes):
            about = "the input embedding and the output layer (tie_word_embeddings)"
            self._streaks.tell("untied", 2, about)
        roots = (node.module() for node in self._nodes if node.is_root)
        if about := next(filter(None, map(repeated, roots)), ""):
            self._streaks.tell("repeated_layer", 1, about)


def _place_of_program() -> str:
    frame = next(program_frames(), None)
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def _counted(modules: Sequence[torch.nn.Module]) -> str:
    """The classes of modules, and how many modules these are."""
    kinds = dict.fromkeys(type(module).__name__ for module in modules)
    return f"{', '.join(kinds)}, {len(modules)} module{'s' if len(modules) > 1 else ''}"


def _has_modes(module: torch.nn.Module) -> bool:
    """True if it computes something else in evaluation."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats


def _is_frozen_norm(module: torch.nn.Module) -> bool:
    weight = module.weight if isinstance(module, _BatchNorm) else None
    return weight is not None and not weight.requires_grad


def _averages_little(module: torch.nn.Module) -> bool:
    momentum = module.momentum if isinstance(module, _BatchNorm) else None
    return momentum is not None and not 0 < momentum < _LARGE_MOMENTUM
