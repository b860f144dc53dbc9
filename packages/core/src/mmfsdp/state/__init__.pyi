from mmfsdp.state.lazy_tensors import whole_value as whole_value
from mmfsdp.state.local_view import LocalView as LocalView
from mmfsdp.state.local_view import exchanged as exchanged
from mmfsdp.state.report import LoadReport as LoadReport
from mmfsdp.state.report import compare_shapes as compare_shapes
