"""A live sharded model and plain state dicts, one from the other."""

from mmfsdp.runtime.dtensors import Box, box_of, local_part
from mmfsdp.state.model import load_model_state_dict, model_state_dict
from mmfsdp.state.optimizer import load_optim_state_dict, optim_state_dict
from mmfsdp.state.report import LoadReport

__all__ = [
    "Box",
    "LoadReport",
    "box_of",
    "load_model_state_dict",
    "load_optim_state_dict",
    "local_part",
    "model_state_dict",
    "optim_state_dict",
]
