from mmfsdp.optimizers.building import MuonWithAdamW as MuonWithAdamW
from mmfsdp.optimizers.functions import MatrixFunction as MatrixFunction
from mmfsdp.optimizers.matrix_optimizer import MatrixOptimizer as MatrixOptimizer
