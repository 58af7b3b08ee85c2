"""A run from parsed options to files: check everything, build the parts, restore a state, run the loop, save."""

from __future__ import annotations

import importlib
import inspect
import logging
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from library import grad_filter, settings
from library.accelerator import DTYPES, LogSettings, ScalarLog, build_accelerator
from library.errors import OptionError, RunStopped
from library.run_plan import RunPlan, Update, initial_step

log = logging.getLogger(__name__)
