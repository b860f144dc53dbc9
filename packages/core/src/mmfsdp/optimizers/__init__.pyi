from mmfsdp.optimizers.building import MuonWithAdamW as MuonWithAdamW
from mmfsdp.optimizers.functions import MatrixFunction as MatrixFunction
from mmfsdp.optimizers.matrix_optimizer import MatrixOptimizer as MatrixOptimizer
from mmfsdp.optimizers.states import join_states as join_states
from mmfsdp.optimizers.states import split_state as split_state
