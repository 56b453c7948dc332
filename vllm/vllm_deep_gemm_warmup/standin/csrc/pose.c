/* The posed device.  Python's device.py is the one place that knows the poses; it hands
 * the values over in STANDIN_GPU as "key=value;key=value". */
#define _GNU_SOURCE
#include "standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct si_pose pose;
static bool posed;
static int visible[SI_MAX_DEVICES];
static int visible_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void set(const char *key, const char *value)
{
    long long number = atoll(value);
    if (!strcmp(key, "name"))
        snprintf(pose.name, sizeof pose.name, "%s", value);
    else if (!strcmp(key, "driver"))
        snprintf(pose.driver_release, sizeof pose.driver_release, "%s", value);
    else if (!strcmp(key, "major"))
        pose.major = (int)number;
    else if (!strcmp(key, "minor"))
        pose.minor = (int)number;
    else if (!strcmp(key, "sms"))
        pose.sm_count = (int)number;
    else if (!strcmp(key, "clock_khz"))
        pose.clock_khz = (int)number;
    else if (!strcmp(key, "memory_clock_khz"))
        pose.memory_clock_khz = (int)number;
    else if (!strcmp(key, "bus_bits"))
        pose.bus_width_bits = (int)number;
    else if (!strcmp(key, "l2_bytes"))
        pose.l2_bytes = (int)number;
    else if (!strcmp(key, "total_bytes"))
        pose.total_bytes = (size_t)number;
    else if (!strcmp(key, "board_bytes"))
        pose.board_bytes = (size_t)number;
    else if (!strcmp(key, "pci_device"))
        pose.pci_device_id = (unsigned)number;
    else if (!strcmp(key, "devices"))
        pose.board_devices = number > SI_MAX_DEVICES ? SI_MAX_DEVICES : (int)number;
    else if (!strcmp(key, "cuda"))
        pose.driver_version = (int)number;
}

static void choose_visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (list == NULL) {
        for (int i = 0; i < pose.board_devices; i++)
            visible[visible_count++] = i;
        return;
    }
    /* As the driver does: the first entry that names no device ends the list. */
    while (*list != '\0' && visible_count < SI_MAX_DEVICES) {
        char *end;
        long index = strtol(list, &end, 10);
        if (end == list || index < 0 || index >= pose.board_devices)
            return;
        visible[visible_count++] = (int)index;
        list = *end == ',' ? end + 1 : end;
        if (*end != ',' && *end != '\0')
            return;
    }
}

static void parse(void)
{
    const char *text = getenv("STANDIN_GPU");
    if (text == NULL || *text == '\0')
        return;
    char copy[1024];
    snprintf(copy, sizeof copy, "%s", text);
    char *rest = NULL;
    for (char *field = strtok_r(copy, ";", &rest); field; field = strtok_r(NULL, ";", &rest)) {
        char *equal = strchr(field, '=');
        if (equal == NULL)
            continue;
        *equal = '\0';
        set(field, equal + 1);
    }
    posed = pose.sm_count > 0 && pose.major > 0 && pose.total_bytes > 0;
    choose_visible();
}

const struct si_pose *si_pose(void)
{
    pthread_once(&once, parse);
    return posed ? &pose : NULL;
}

int si_device_count(void)
{
    return si_pose() ? visible_count : 0;
}

int si_board_index(int ordinal)
{
    return visible[ordinal];
}

void si_uuid(int board_index, unsigned char out[16])
{
    memcpy(out, "STANDIN-NO-GPU-", 15);
    out[15] = (unsigned char)board_index;
}
