"""placeholder"""


class Staging:
    pass
