from mmfsdp.parity.comparing import compare as compare
from mmfsdp.parity.comparison import Compared as Compared
from mmfsdp.parity.comparison import Comparison as Comparison
from mmfsdp.parity.comparison import Difference as Difference
from mmfsdp.parity.page import comparison_page as comparison_page
from mmfsdp.parity.recorder import Recording as Recording
from mmfsdp.parity.recorder import recording as recording
from mmfsdp.parity.records import Key as Key
