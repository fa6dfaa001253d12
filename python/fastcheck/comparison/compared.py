"""Compared: the pairs of one step of one rank with what was found of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .block import Block


class Compared(NamedTuple):
    """Arrays have one element a pair, in the order of the reference.

    ``step``: the reference's; ``before``: the step whose update the parameters of this one show;
    ``names``: numbers of the Runner's NameTable; ``phases``, ``states``: values of Phase and State;
    ``errors``: relative errors, and ``limits``: what is allowed of them; ``reasons``: indices of
    REASONS; ``records``: of actual and of reference, RECORD_DTYPE; ``blocks``: all tensors of
    either side.
    """

    step: int
    before: int
    rank: int
    names: np.ndarray
    phases: np.ndarray
    states: np.ndarray
    errors: np.ndarray
    reasons: np.ndarray
    limits: np.ndarray
    records: tuple[np.ndarray, np.ndarray]
    blocks: tuple[Block, Block]
