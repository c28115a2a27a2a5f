from tests.gpu.cases import Case

CASES: list[Case] = []
