"""What must hold between an implementation's own results."""

from properties import checks
from properties.checks import Search, Subject
from properties.operation import Law


def test_law_holds(subject: Subject, law: Law, search: Search) -> None:
    checks.law_holds(law, subject, search)
