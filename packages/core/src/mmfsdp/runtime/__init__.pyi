from mmfsdp.runtime.gradients.clipping import check_finite_norm as check_finite_norm
from mmfsdp.runtime.gradients.reachability import LossReach as LossReach
from mmfsdp.runtime.ranks.buffers import keep_buffers_alike as keep_buffers_alike
from mmfsdp.runtime.sharded_model import ShardedModel as ShardedModel
from mmfsdp.runtime.sharded_model import find_sharded_model as find_sharded_model
