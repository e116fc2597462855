from .exam_context import ExamSettings as ExamSettings
from .examination import examine as examine
from .record import FILE as FILE, Examination as Examination, read_examination as read_examination
from .static import examine_files as examine_files
