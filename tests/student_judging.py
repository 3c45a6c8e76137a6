"""A student's code asked and judged in this process."""

from collections.abc import Callable, Mapping
from typing import Any

from minigpt.inspection.students.answers import Series
from minigpt.inspection.students.calls import ask_function, ask_layer
from minigpt.inspection.students.diagnosis import Verdict, judge
from minigpt.inspection.students.evidence import weigh
from minigpt.inspection.students.layer import NAMES, Layer
from minigpt.inspection.students.trials import asked_of_functions, asked_of_layers
from minigpt.inspection.worked.examples import load_examples

OF_FUNCTIONS, OF_LAYERS = asked_of_functions(load_examples()), asked_of_layers(load_examples())


def judged(function: Callable[..., Any], masks: str = "any") -> Verdict:
    def enough(series: Series) -> bool:
        return weigh(series, OF_FUNCTIONS[series.n_axis]).right

    return judge(ask_function(function, OF_FUNCTIONS, lambda _: None, enough, masks), OF_FUNCTIONS)


def judged_class(kind: type, names: Mapping[str, str] = NAMES) -> Verdict:
    def enough(series: Series) -> bool:
        return weigh(series, OF_LAYERS[series.n_axis]).right

    return judge(ask_layer(Layer(kind, names), OF_LAYERS, lambda _: None, enough), OF_LAYERS)
