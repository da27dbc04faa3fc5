#pragma once
typedef char *va_list;
