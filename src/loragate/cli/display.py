"""Until every room imports `loragate.display`."""

from loragate.display import FILE_WIDTH as FILE_WIDTH
from loragate.display import PLAIN_SECONDS as PLAIN_SECONDS
from loragate.display import Display as Display
from loragate.display import Job as Job
from loragate.display import Parts as Parts
from loragate.display import console as console
from loragate.display import duration as duration
from loragate.display import next_evaluation as next_evaluation
from loragate.display import printable as printable
from loragate.display import time_left as time_left
